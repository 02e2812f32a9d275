// The selection: what the colors mean, the layer, and the token of an answer.
export const look = { view: "expert", layer: 0, numbers: false, only: null, shown: null, token: -1 };

// Changes come faster than frames: all changes between two frames cause one drawing.
const waiting = new Set();
let isScheduled = false;

export function draw(...tasks) {
  for (const task of tasks) waiting.add(task);
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(() => {
    isScheduled = false;
    const tasks = [...waiting];
    waiting.clear();
    for (const task of tasks) task();
  });
}

// What the reader looks at: by what tokens are coloured, in which layer, and which token of which answer.
export const look = { view: "expert", layer: 0, numbers: false, only: null, shown: null, token: -1 };

// Changes come faster than pictures: of all that are told between two of them, one drawing is made.
const waiting = new Set();
let isAsked = false;

export function draw(...tasks) {
  for (const task of tasks) waiting.add(task);
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(() => {
    isAsked = false;
    const found = [...waiting];
    waiting.clear();
    for (const task of found) task();
  });
}

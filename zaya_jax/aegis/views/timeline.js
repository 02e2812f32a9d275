const [plot, axis, cursor, brush] = ["plot", "axis", "cursor", "brush"].map(find);
const lanes = [...plot.querySelectorAll("svg.lane")];
const TICKS = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
const TICK_PIXELS = 110, NEAR_PIXELS = 6, MAX_LISTED = 8;
// The visible range, in seconds since the start of the run.
let from = 0, to = data.seconds;

const pad = (number) => String(number).padStart(2, "0");
function when(seconds, step) {
  const date = new Date(1000 * (data.start + seconds));
  const day = `${date.getUTCFullYear()}-${pad(date.getUTCMonth() + 1)}-${pad(date.getUTCDate())}`;
  const minute = `${pad(date.getUTCHours())}:${pad(date.getUTCMinutes())}`;
  if (step === undefined) return `${day} ${minute}:${pad(date.getUTCSeconds())}`;
  if (step >= 86400) return day;
  return step >= 60 ? (minute === "00:00" ? day : minute) : `${minute}:${pad(date.getUTCSeconds())}`;
}

function show(first, last) {
  const least = Math.max(data.seconds / 20000, 1e-3);
  const width = Math.min(Math.max(last - first, least), data.seconds);
  from = Math.min(Math.max(first, 0), data.seconds - width);
  to = from + width;
  const unit = data.width / data.seconds;
  for (const lane of lanes) {
    lane.setAttribute("viewBox", `${from * unit} 0 ${width * unit} ${lane.viewBox.baseVal.height}`);
  }
  drawTicks();
}

function drawTicks() {
  const seconds = to - from;
  const step = TICKS.find((each) => (each / seconds) * plot.clientWidth >= TICK_PIXELS) ?? TICKS.at(-1);
  const ticks = [];
  // Ticks are at whole minutes and hours of the clock, not of the run.
  for (let time = Math.ceil((data.start + from) / step) * step; time <= data.start + to; time += step) {
    const tick = document.createElement("div");
    tick.className = "tick";
    tick.style.left = `${(100 * (time - data.start - from)) / seconds}%`;
    tick.textContent = when(time - data.start, step);
    ticks.push(tick);
  }
  axis.replaceChildren(...ticks);
}

const placeOf = (event) => event.clientX - plot.getBoundingClientRect().left;
const timeAt = (place) => from + ((to - from) * place) / plot.clientWidth;

function showMarks(event) {
  const place = placeOf(event), time = timeAt(place), near = ((to - from) * NEAR_PIXELS) / plot.clientWidth;
  const lane = event.target.closest?.("svg.lane")?.dataset.lane;
  const found = data.marks.filter((mark) => mark[1] === lane && Math.abs(mark[0] - time) <= near);
  const lines = found.slice(0, MAX_LISTED).map(([at, , kind, step, text]) => {
    return `${when(at)}  ${kind}${step === null ? "" : `, step ${step.toLocaleString("en")}`}: ${text}`;
  });
  if (found.length > MAX_LISTED) lines.push(`and ${found.length - MAX_LISTED} more`);
  const title = event.target.querySelector?.("title")?.textContent;
  cursor.style.display = "block";
  cursor.style.left = `${place}px`;
  showTip(event, lines.join("\n") || when(time) + (title ? `\n${title}` : ""));
}

let pressed = null;
plot.addEventListener("pointerdown", (event) => { pressed = placeOf(event); });
plot.addEventListener("pointermove", (event) => {
  showMarks(event);
  if (pressed === null) return;
  brush.style.display = "block";
  brush.style.left = `${Math.min(pressed, placeOf(event))}px`;
  brush.style.width = `${Math.abs(placeOf(event) - pressed)}px`;
});
addEventListener("pointerup", (event) => {
  if (pressed === null) return;
  const [first, last] = [pressed, placeOf(event)].sort((a, b) => a - b).map(timeAt);
  const isDrag = Math.abs(placeOf(event) - pressed) > NEAR_PIXELS;
  pressed = null;
  brush.style.display = "none";
  if (isDrag) show(first, last);
});
plot.addEventListener("pointerleave", () => { cursor.style.display = tip.style.display = "none"; });
plot.addEventListener("dblclick", () => show(0, data.seconds));
plot.addEventListener("wheel", (event) => {
  event.preventDefault();
  const time = timeAt(placeOf(event)), factor = Math.exp(event.deltaY / 400);
  show(time - (time - from) * factor, time + (to - time) * factor);
}, { passive: false });
addEventListener("resize", drawTicks);

function cell(text) {
  const made = document.createElement("td");
  made.textContent = text;
  return made;
}

const rows = data.marks.map((mark) => {
  const [time, lane, kind, step, text] = mark, row = document.createElement("tr");
  row.append(cell(when(time)), cell(kind), cell(step === null ? "" : step.toLocaleString("en")), cell(text));
  row.addEventListener("click", () => {
    show(time - data.seconds / 50, time + data.seconds / 50);
    plot.scrollIntoView({ block: "center" });
  });
  return [`${lane} ${kind} ${text}`.toLowerCase(), row];
});

function filter() {
  const words = find("filter").value.toLowerCase().split(/\s+/);
  const shown = rows.filter(([text]) => words.every((word) => text.includes(word)));
  find("rows").replaceChildren(...shown.map(([, row]) => row));
  find("count").textContent = `${shown.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")}`;
}

find("filter").addEventListener("input", filter);
show(0, data.seconds);
filter();

// Curves of one column of all runs, each on its own canvas; all show the same window of steps or tokens.
const HEIGHT = 210, LEFT = 52, RIGHT = 10, TOP = 18, BOTTOM = 20;
const NEAR_PIXELS = 6, TICK_PIXELS = 90, SMALLEST_DRAG = 8, DASH = [6, 3], COLOURS = 8, DOT_PIXELS = 9;
// The user's settings. The window is [first, last] of the axis, or null for all of it.
const chosen = { axis: "steps", smoothing: 0.6, hidden: new Set(), window: null };

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const colourOf = (number) => colour(`run-${number % COLOURS}`);
const grouped = (number) => Math.round(number).toLocaleString("en");

function short(value) {
  const size = Math.abs(value);
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${Number((value / (name === "k" ? 1e3 : unit)).toPrecision(4))}${name}`;
  }
  return size && size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// Tick values in steps of 1, 2 or 5 times a power of ten.
function ticksOf(low, high, most) {
  const rough = (high - low) / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high; n++) found.push(n * step);
  return found;
}

function logarithmicTicks(low, high, most) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const each of [1, 2, 5]) found.push(each * 10 ** power);
  }
  const within = found.filter((tick) => tick >= low && tick <= high);
  // Less than a decade: linear ticks, as on a linear axis.
  if (within.length < 3) return ticksOf(low, high, most).filter((tick) => tick > 0);
  const size = Math.ceil(within.length / most);
  return within.filter((_, n) => n % size === 0);
}

// An exponential moving average with bias correction; the weight applies to earlier values.
function smooth(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle; else high = middle;
  }
  return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? low : high;
}

// Position of a step on the axis.
function placeOf(run, step) {
  const { steps, tokens } = run.train;
  if (chosen.axis === "steps") return step;
  if (!tokens) return null;
  const next = steps.findIndex((each) => each >= step);
  if (next <= 0) return next ? tokens.at(-1) : (tokens[0] * step) / steps[0];
  const share = (step - steps[next - 1]) / (steps[next] - steps[next - 1]);
  return tokens[next - 1] + share * (tokens[next] - tokens[next - 1]);
}

// Lines of a column: one for each visible run that has it.
function linesOf(column, smoothing) {
  const found = [];
  data.runs.forEach((run, number) => {
    const values = run.train.curves[column];
    // Values that exist only at some steps: held-out loss and tasks.
    const rareName = column in run.tasks.curves ? "task" : "held-out";
    const rare = rareName === "task" ? run.tasks : run.held_out, rareValues = rare.curves[column];
    const places = run.train[chosen.axis];
    if (chosen.hidden.has(number) || !places || (!values && !rareValues)) return;
    const [mean, low = mean, high = mean] = values ?? [[]];
    const dots = (rare[chosen.axis] ?? []).map((place, n) => [place, rareValues?.[0][n] ?? null]);
    found.push({
      run, number, places, mean, low, high, isThinned: values?.length > 1,
      drawn: smooth(mean, smoothing), rareName, dots: dots.filter(([, value]) => value !== null),
    });
  });
  return found;
}

// The full range of the axis over all visible runs, which all charts share.
function wholeWindow() {
  const ends = data.runs.filter((_, number) => !chosen.hidden.has(number))
    .map((run) => run.train[chosen.axis]?.at(-1) ?? 0);
  return [0, Math.max(1, ...ends)];
}

function prepare(canvas, height) {
  const scale = globalThis.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.font = "11px system-ui, sans-serif";
  return [context, width];
}

class Curves {
  constructor(figure) {
    this.column = figure.dataset.column;
    this.isExact = "exact" in figure.dataset;
    this.canvas = figure.querySelector("canvas");
    this.button = figure.querySelector("button.log");
    this.pressed = this.pointed = this.dragged = null;
    this.button.addEventListener("click", () => {
      this.button.setAttribute("aria-pressed", this.isLogarithmic ? "false" : "true");
      this.draw();
    });
    const on = (kind, listener) => this.canvas.addEventListener(kind, listener);
    on("pointerdown", (event) => { this.pressed = this.at(event); });
    on("pointermove", (event) => this.point(event));
    on("pointerup", (event) => this.release(event));
    on("pointercancel", () => this.leave());
    on("pointerleave", () => this.leave());
    on("dblclick", () => { chosen.window = null; drawAll(); });
  }

  get smoothing() { return this.isExact ? 0 : chosen.smoothing; }

  get isLogarithmic() { return this.button.getAttribute("aria-pressed") === "true"; }

  at(event) {
    const [first, last] = this.window, share = (event.offsetX - LEFT) / (this.width - LEFT - RIGHT);
    return first + Math.min(Math.max(share, 0), 1) * (last - first);
  }

  point(event) {
    this.pointed = this.at(event);
    this.dragged = this.pressed === null || Math.abs(this.x(this.pressed) - this.x(this.pointed)) < SMALLEST_DRAG
      ? null : [this.pressed, this.pointed].sort((a, b) => a - b);
    this.draw();
    const said = this.lines.flatMap((line) => this.say(line));
    if (said.length) showTip(event, said.join("\n")); else tip.style.display = "none";
  }

  release(event) {
    // A scrolling finger is not a drag.
    if (this.dragged && event.pointerType !== "touch") chosen.window = this.dragged;
    this.pressed = this.dragged = null;
    drawAll();
  }

  leave() {
    this.pressed = this.pointed = this.dragged = null;
    tip.style.display = "none";
    this.draw();
  }

  say(line) {
    const found = [], n = line.mean.length ? nearest(line.places, this.pointed) : -1;
    if (n >= 0 && line.mean[n] !== null) {
      const range = line.isThinned ? ` (${short(line.low[n])} to ${short(line.high[n])})` : "";
      const smoothed = this.smoothing > 0 ? `, smoothed ${short(line.drawn[n])}` : "";
      const step = `step ${grouped(line.run.train.steps[n])}`;
      found.push(`${line.run.name}, ${step}: ${short(line.mean[n])}${range}${smoothed}`);
    }
    const near = line.dots.findIndex(([place]) => Math.abs(this.x(place) - this.x(this.pointed)) <= NEAR_PIXELS);
    if (near >= 0) found.push(`${line.run.name}, ${line.rareName}: ${short(line.dots[near][1])}`);
    for (const [step, text] of this.marksOf(line)) {
      if (Math.abs(this.x(placeOf(line.run, step)) - this.x(this.pointed)) > NEAR_PIXELS) continue;
      found.push(`${line.run.name}, step ${grouped(step)}, ${text}`);
    }
    return found;
  }

  draw() {
    [this.context, this.width] = prepare(this.canvas, HEIGHT);
    this.window = chosen.window ?? wholeWindow();
    this.lines = linesOf(this.column, this.smoothing);
    const values = this.lines.flatMap((line) => [
      ...[line.low, line.high, line.drawn].flatMap((each) => each.filter((_, n) => this.isWithin(line.places[n]))),
      ...line.dots.filter(([place]) => this.isWithin(place)).map(([, value]) => value),
    ]).filter((value) => value !== null && (!this.isLogarithmic || value > 0));
    this.setRange(values);
    this.drawAxes(values.length > 0);
    this.context.save();
    this.context.beginPath();
    this.context.rect(LEFT, TOP - 4, this.width - LEFT - RIGHT, HEIGHT - TOP - BOTTOM + 8);
    this.context.clip();
    for (const line of this.lines) this.drawLine(line);
    for (const line of this.lines) this.drawMarks(line);
    this.drawPointer();
    this.context.restore();
  }

  marksOf({ run }) {
    return run.marks.filter(([step]) => {
      const place = placeOf(run, step);
      return place !== null && this.isWithin(place);
    });
  }

  setRange(values) {
    // Not Math.min(...values): a long run has more values than a call accepts arguments.
    const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    const bend = this.isLogarithmic ? Math.log : (value) => value;
    let [bottom, top] = values.length ? [bend(low), bend(high)] : [0, 1];
    // A constant is in the middle, and constant zero at the bottom.
    if (top === bottom) [bottom, top] = [bottom - Math.abs(bottom) / 10, top + (Math.abs(top) / 10 || 1)];
    const margin = (top - bottom) * 0.04;
    [bottom, top] = [bottom - margin, top + margin];
    const unit = (HEIGHT - TOP - BOTTOM) / (top - bottom), across = this.width - LEFT - RIGHT;
    this.y = (value) => HEIGHT - BOTTOM - (bend(value) - bottom) * unit;
    this.x = (place) => LEFT + (across * (place - this.window[0])) / (this.window[1] - this.window[0]);
    this.range = this.isLogarithmic ? [Math.exp(bottom), Math.exp(top)] : [bottom, top];
  }

  drawAxes(hasValues) {
    const { context } = this, right = this.width - RIGHT, bottom = HEIGHT - BOTTOM;
    context.strokeStyle = colour("line");
    context.fillStyle = colour("dim");
    context.lineWidth = 1;
    context.textAlign = "right";
    const ticks = this.isLogarithmic ? logarithmicTicks : ticksOf;
    for (const tick of hasValues ? ticks(...this.range, 5) : []) {
      this.stroke([[LEFT, this.y(tick)], [right, this.y(tick)]]);
      context.fillText(short(tick), LEFT - 5, this.y(tick) + 4);
    }
    for (const tick of ticksOf(...this.window, (right - LEFT) / TICK_PIXELS)) {
      this.stroke([[this.x(tick), bottom], [this.x(tick), bottom + 4]]);
      context.textAlign = this.x(tick) > right - 12 ? "right" : "center";
      context.fillText(short(tick), Math.min(this.x(tick), this.width), HEIGHT - 4);
    }
    context.textAlign = "center";
    if (hasValues) this.drawPhases(); else context.fillText("no values", (LEFT + right) / 2, HEIGHT / 2);
  }

  // The start of each phase of the visible runs, in the run's color unless runs share it.
  drawPhases() {
    const begins = new Map();
    for (const { run, number } of this.lines) {
      run.phases.forEach(([name, last], n) => {
        const place = n ? placeOf(run, run.phases[n - 1][1]) : 0, key = `${place} ${name}`;
        // A phase that ended before the window starts is not labelled at its edge.
        if (place === null || placeOf(run, last) <= this.window[0]) return;
        begins.set(key, [place, name, begins.has(key) ? colour("dim") : colourOf(number)]);
      });
    }
    const { context } = this;
    let free = -Infinity;
    context.textAlign = "left";
    context.setLineDash([2, 3]);
    for (const [place, name, tone] of [...begins.values()].sort((a, b) => a[0] - b[0])) {
      const x = Math.max(this.x(place), LEFT);
      context.strokeStyle = context.fillStyle = tone;
      if (place > this.window[0]) this.stroke([[x, TOP - 8], [x, HEIGHT - BOTTOM]]);
      if (x < free || x > this.width - RIGHT) continue;
      context.fillText(name, x + 3, TOP - 7);
      free = x + context.measureText(name).width + 12;
    }
    context.setLineDash([]);
  }

  drawLine(line) {
    const { context } = this, paint = colourOf(line.number);
    context.strokeStyle = context.fillStyle = paint;
    context.lineJoin = "round";
    if (line.isThinned) this.fillBetween(line);
    if (!line.isThinned && this.smoothing > 0) {
      context.globalAlpha = 0.28;
      this.strokeValues(line.places, line.mean);
    }
    context.globalAlpha = 1;
    context.lineWidth = 1.6;
    context.setLineDash(line.number >= COLOURS ? DASH : []);
    this.strokeValues(line.places, line.drawn);
    context.setLineDash([]);
    this.drawDots(line.dots.filter(([place, value]) => this.isWithin(place) && this.isDrawn(value)));
    context.lineWidth = 1;
  }

  // Held-out values as dots, or as a dashed line if many dots would hide the curves.
  drawDots(dots) {
    const { context } = this;
    if (dots.length * DOT_PIXELS > this.width) {
      context.lineWidth = 1.2;
      context.setLineDash([4, 2]);
      this.stroke(dots.map(([place, value]) => [this.x(place), this.y(value)]));
      context.setLineDash([]);
      return;
    }
    for (const [place, value] of dots) {
      context.beginPath();
      context.arc(this.x(place), this.y(value), 3.2, 0, 7);
      context.fill();
      context.strokeStyle = colour("back");
      context.stroke();
    }
  }

  // Events of the run, as arrows at the axis.
  drawMarks(line) {
    const { context } = this, bottom = HEIGHT - BOTTOM + 2;
    context.fillStyle = colourOf(line.number);
    for (const [step] of this.marksOf(line)) {
      const x = this.x(placeOf(line.run, step));
      context.beginPath();
      context.moveTo(x, bottom - 9);
      context.lineTo(x - 4, bottom);
      context.lineTo(x + 4, bottom);
      context.fill();
    }
  }

  fillBetween({ places, low, high }) {
    const { context } = this, known = places.map((_, n) => n).filter((n) => this.isDrawn(low[n]));
    context.globalAlpha = 0.2;
    context.beginPath();
    for (const n of known) context.lineTo(this.x(places[n]), this.y(high[n]));
    for (const n of known.reverse()) context.lineTo(this.x(places[n]), this.y(low[n]));
    context.fill();
    // A single outlier has no width, so its outline is drawn.
    context.globalAlpha = 0.4;
    for (const edge of [low, high]) this.strokeValues(places, edge);
  }

  isWithin(place) { return place >= this.window[0] && place <= this.window[1]; }

  isDrawn(value) { return value !== null && value !== undefined && (!this.isLogarithmic || value > 0); }

  strokeValues(places, values) {
    const { context } = this;
    context.beginPath();
    let isOpen = false;
    values.forEach((value, n) => {
      if (!this.isDrawn(value)) { isOpen = false; return; }
      if (isOpen) context.lineTo(this.x(places[n]), this.y(value));
      else context.moveTo(this.x(places[n]), this.y(value));
      isOpen = true;
    });
    context.stroke();
  }

  drawPointer() {
    const { context } = this;
    if (this.dragged) {
      const [first, last] = this.dragged.map(this.x);
      context.globalAlpha = 0.2;
      context.fillStyle = colour("open");
      context.fillRect(first, TOP, last - first, HEIGHT - TOP - BOTTOM);
      context.globalAlpha = 1;
    }
    if (this.pointed === null) return;
    context.strokeStyle = colour("dim");
    this.stroke([[this.x(this.pointed), TOP], [this.x(this.pointed), HEIGHT - BOTTOM]]);
    for (const line of this.lines) {
      const n = line.drawn.length ? nearest(line.places, this.pointed) : -1;
      if (n < 0 || !this.isDrawn(line.drawn[n])) continue;
      context.fillStyle = colourOf(line.number);
      context.beginPath();
      context.arc(this.x(line.places[n]), this.y(line.drawn[n]), 3.5, 0, 7);
      context.fill();
    }
  }

  stroke(points) {
    this.context.beginPath();
    points.forEach(([x, y], n) => (n ? this.context.lineTo(x, y) : this.context.moveTo(x, y)));
    this.context.stroke();
  }
}

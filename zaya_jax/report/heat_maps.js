// Routing over time: one picture per layer, with experts as rows and moments as columns.
const GAP = 3, ENTROPY_ROW = 5, PICTURE_PIXELS = 72, LARGEST_ROW = 16, SMALLEST_ROW = 2;
const isDark = matchMedia("(prefers-color-scheme: dark)");
// Relative to an even share: red saturates at four times, blue at a quarter; zero has its own color.
const FURTHEST = 2;
const PALETTES = {
  light: { even: [240, 241, 244], more: [200, 48, 30], less: [38, 90, 190], none: [20, 22, 28], skip: [120, 60, 190] },
  dark: { even: [44, 51, 63], more: [250, 110, 80], less: [90, 155, 255], none: [0, 0, 0], skip: [190, 140, 250] },
};
const palette = () => PALETTES[isDark.matches ? "dark" : "light"];
const mix = (from, to, share) => from.map((each, n) => Math.round(each + share * (to[n] - each)));

function loadColour(load) {
  if (load === 0) return palette().none;
  const far = Math.min(Math.abs(Math.log2(load)) / FURTHEST, 1);
  return mix(palette().even, load > 1 ? palette().more : palette().less, far);
}

// A layer's expert loads relative to an even share of tokens that are not skipped, and the skipped share.
function loadsOf(shares) {
  const skipped = shares.at(-1) / data.shares, numExperts = shares.length - 1;
  const loads = shares.slice(0, -1).map((share) => {
    return skipped < 1 ? ((share / data.shares) * numExperts) / (1 - skipped) : 0;
  });
  return [loads, skipped];
}

// Colors by row and column as an image, drawn without interpolation into a part of a canvas.
function paint(context, rows, top, width, height) {
  const image = document.createElement("canvas");
  [image.width, image.height] = [rows[0].length, rows.length];
  const pixels = new ImageData(image.width, image.height);
  rows.flat().forEach((each, n) => pixels.data.set([...each, 255], 4 * n));
  image.getContext("2d").putImageData(pixels, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(image, 0, top, width, height);
}

class HeatMap {
  constructor(parent, run, title) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    this.run = run;
    this.canvas = document.createElement("canvas");
    caption.textContent = title;
    figure.append(caption, this.canvas);
    parent.append(figure);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  }

  // Indices of the moments in the visible window.
  get moments() {
    const { router } = this.run, places = router[chosen.axis] ?? router.steps;
    const [first, last] = chosen.window ?? [-Infinity, Infinity];
    const found = places.map((_, n) => n).filter((n) => places[n] >= first && places[n] <= last);
    return found.length ? found : [nearest(places, (first + last) / 2)];
  }

  point(event) {
    const moments = this.moments, column = Math.floor((event.offsetX / this.canvas.clientWidth) * moments.length);
    const moment = moments[Math.min(Math.max(column, 0), moments.length - 1)];
    showTip(event, `step ${grouped(this.run.router.steps[moment])}\n${this.say(moment, event.offsetY)}`);
  }
}

class LoadMap extends HeatMap {
  constructor(parent, run, layer) {
    super(parent, run, `layer ${layer}`);
    this.layer = layer;
    this.numExperts = run.router.shares[0][layer].length - 1;
    this.row = Math.min(Math.max(Math.floor(PICTURE_PIXELS / this.numExperts), SMALLEST_ROW), LARGEST_ROW);
  }

  loads(moment) { return loadsOf(this.run.router.shares[moment][this.layer]); }

  draw() {
    const experts = this.numExperts * this.row, skip = Math.max(this.row, 6);
    const [context, width] = prepare(this.canvas, experts + GAP + skip);
    const loads = this.moments.map((moment) => this.loads(moment));
    const rows = Array.from({ length: this.numExperts }, (_, e) => loads.map(([each]) => loadColour(each[e])));
    paint(context, rows, 0, width, experts);
    const skipped = loads.map(([, share]) => mix(palette().even, palette().skip, Math.sqrt(share)));
    paint(context, [skipped], experts + GAP, width, skip);
  }

  say(moment, y) {
    const [loads, skipped] = this.loads(moment), expert = Math.floor(y / this.row);
    if (expert >= this.numExperts) return `layer ${this.layer}: ${(100 * skipped).toFixed(2)} % of the tokens skip`;
    const share = this.run.router.shares[moment][this.layer][expert] / data.shares;
    const load = `${loads[expert].toFixed(2)} of an even share`;
    return `layer ${this.layer}, expert ${expert}: ${load}, ${(100 * share).toFixed(2)} % of the tokens`;
  }
}

class EntropyMap extends HeatMap {
  constructor(parent, run) {
    super(parent, run, "entropy by layer");
    const values = run.router.entropy.flat();
    [this.low, this.high] = [Math.min(...values), Math.max(...values)];
    this.numLayers = run.router.entropy[0].length;
    this.row = Math.max(ENTROPY_ROW, Math.min(Math.floor(PICTURE_PIXELS / this.numLayers), LARGEST_ROW));
  }

  draw() {
    const [context, width] = prepare(this.canvas, this.numLayers * this.row);
    const range = this.high - this.low || 1;
    const rows = Array.from({ length: this.numLayers }, (_, layer) => this.moments.map((moment) => {
      const share = (this.run.router.entropy[moment][layer] - this.low) / range;
      return mix(palette().skip, palette().even, share);
    }));
    paint(context, rows, 0, width, this.numLayers * this.row);
  }

  say(moment, y) {
    const layer = Math.min(Math.floor(y / this.row), this.numLayers - 1);
    const range = `${short(this.low)} to ${short(this.high)} in this run`;
    return `layer ${layer}: ${short(this.run.router.entropy[moment][layer])} nats; ${range}`;
  }
}

function mapsOf(parent) {
  const run = data.runs[parent.dataset.run];
  const maps = run.router.shares[0].map((_, layer) => new LoadMap(parent, run, layer));
  return [...maps, new EntropyMap(parent, run)];
}

class LoadScale {
  constructor(parent) {
    this.canvas = document.createElement("canvas");
    const [before, behind] = ["none, then a quarter ", " four times"].map((text) => document.createTextNode(text));
    parent.append(before, this.canvas, behind);
  }

  draw() {
    const [context, width] = prepare(this.canvas, 10);
    const loads = Array.from({ length: 65 }, (_, n) => 2 ** (FURTHEST * (n / 32 - 1)));
    paint(context, [[...Array(6).fill(palette().none), ...loads.map(loadColour)]], 0, width, 10);
  }
}

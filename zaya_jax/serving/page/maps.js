// Images of an answer in all layers, one pixel per cell. CSS scales the pixels.
import { NUM_STEPS, expertColour, rampColour, skipColour, stepOfProbability } from "./palette.js";
import { UNKNOWN } from "./trace.js";

const MAX_WIDTH = 16_384;  // pixels that browsers support in a canvas
const dark = matchMedia("(prefers-color-scheme: dark)");
export const theme = () => (dark.matches ? "dark" : "light");

// A pixel has the bytes red, green, blue and opacity. Writing them as one integer is faster.
const pixelOf = (hex) => {
  const bytes = new Uint8Array([...[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)), 255]);
  return new Uint32Array(bytes.buffer)[0];
};

function tableOf(numExperts) {
  const now = theme(), steps = Array.from({ length: NUM_STEPS }, (_, n) => rampColour("probability", n, now));
  return {
    experts: Array.from({ length: numExperts }, (_, n) => pixelOf(expertColour(n, now))),
    steps: steps.map(pixelOf),
    skip: pixelOf(skipColour(now)),
  };
}

function colourOf(trace, token, layer, view, table) {
  const expert = trace.expert(token, layer);
  if (expert === UNKNOWN) return 0;  // transparent
  if (expert === trace.numExperts) return table.skip;
  if (view !== "probability") return table.experts[expert];
  return table.steps[stepOfProbability(trace.probability(token, layer))];
}

// The map of experts: tokens from left to right, layers from top to bottom. Draws only what is new.
export class WayMap {
  #trace = null; #view = ""; #theme = ""; #numDrawn = 0;
  stride = 1;  // tokens per pixel; above 1 if there are more tokens than a canvas has columns

  constructor(canvas) { this.canvas = canvas; }

  update(trace, view) {
    const isAnother = this.#trace !== trace || this.#view !== view || this.#theme !== theme();
    if (isAnother || trace.numTokens > this.canvas.width * this.stride || this.canvas.height !== trace.numLayers) {
      [this.#trace, this.#view, this.#theme, this.#numDrawn] = [trace, view, theme(), 0];
      this.#fit();
    }
    this.#draw(Math.ceil(trace.numTokens / this.stride));
  }

  // Twice the required width, so that the canvas is seldom resized and redrawn.
  #fit() {
    const { numTokens, numLayers } = this.#trace;
    for (this.stride = 1; numTokens > MAX_WIDTH * this.stride;) this.stride *= 2;
    this.canvas.width = Math.min(Math.max(2 * Math.ceil(numTokens / this.stride), 256), MAX_WIDTH);
    this.canvas.height = numLayers;
  }

  get numColumns() { return this.#numDrawn; }

  #draw(numColumns) {
    const from = this.#numDrawn, width = numColumns - from, trace = this.#trace;
    if (width <= 0 || !trace.numLayers) return;
    const image = new ImageData(width, trace.numLayers), pixels = new Uint32Array(image.data.buffer);
    const table = tableOf(trace.numExperts);
    for (let layer = 0; layer < trace.numLayers; layer++) {
      for (let n = 0; n < width; n++) {
        pixels[layer * width + n] = colourOf(trace, (from + n) * this.stride, layer, this.#view, table);
      }
    }
    this.canvas.getContext("2d").putImageData(image, from, 0);
    this.#numDrawn = numColumns;
  }
}

// The map of loads: layers from left to right, experts from top to bottom, skips last. Darker means more tokens.
export function drawLoads(canvas, trace) {
  const { numLayers, numExperts } = trace, height = numExperts + 1;
  if (!numLayers) return;
  [canvas.width, canvas.height] = [numLayers, height];
  const image = new ImageData(numLayers, height), pixels = new Uint32Array(image.data.buffer);
  const { steps } = tableOf(numExperts);
  const loads = Array.from({ length: numLayers }, (_, layer) => trace.loads(layer));
  const most = Math.max(1, ...loads.flatMap((each) => [...each]));
  loads.forEach((each, layer) => each.forEach((count, expert) => {
    pixels[expert * numLayers + layer] = steps[Math.ceil((count / most) * (NUM_STEPS - 1))];
  }));
  canvas.getContext("2d").putImageData(image, 0, 0);
}

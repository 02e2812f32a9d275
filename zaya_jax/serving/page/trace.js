// The path of an answer's tokens through the layers: the expert that each router selected, and its probability.
export const UNKNOWN = 0xffff;  // expert of a token that was generated but never processed, such as the last one

function grown(array, length) {
  if (array.length >= length) return array;
  const larger = new array.constructor(Math.max(2 * array.length, length, 1024));
  larger.set(array);
  return larger;
}

export class Trace {
  numTokens = 0; numLayers = 0; texts = []; logprobs = [];
  #experts = new Uint16Array(0); #probabilities = new Float32Array(0); #loads = [];

  constructor(numExperts) { this.numExperts = numExperts; }

  // Adds the routing of a chunk: { tokens, logprobs, experts, probabilities }.
  add({ tokens, logprobs, experts, probabilities }) {
    tokens.forEach((text, n) => {
      this.texts.push(text);
      this.logprobs.push(logprobs?.[n] ?? NaN);
      this.#addWay(experts?.[n] ?? null, probabilities?.[n] ?? null);
      this.numTokens++;
    });
  }

  #addWay(experts, probabilities) {
    if (experts && !this.numLayers) this.#begin(experts.length);
    const start = this.numTokens * this.numLayers, end = start + this.numLayers;
    this.#experts = grown(this.#experts, end);
    this.#probabilities = grown(this.#probabilities, end);
    for (let layer = 0; layer < this.numLayers; layer++) {
      const expert = experts?.[layer] ?? UNKNOWN;
      this.#experts[start + layer] = expert;
      this.#probabilities[start + layer] = probabilities?.[layer] ?? NaN;
      if (expert !== UNKNOWN) this.#loads[layer][expert]++;
    }
  }

  // Allocates the arrays at the first token with experts; earlier tokens are unknown.
  #begin(numLayers) {
    this.numLayers = numLayers;
    this.#experts = new Uint16Array(this.numTokens * numLayers).fill(UNKNOWN);
    this.#probabilities = new Float32Array(this.numTokens * numLayers).fill(NaN);
    this.#loads = Array.from({ length: numLayers }, () => new Uint32Array(this.numExperts + 1));
  }

  expert(token, layer) { return this.numLayers ? this.#experts[token * this.numLayers + layer] : UNKNOWN; }
  probability(token, layer) { return this.numLayers ? this.#probabilities[token * this.numLayers + layer] : NaN; }
  // Returns the number of tokens of each expert; the last entry counts those that skipped.
  loads(layer) { return this.#loads[layer] ?? new Uint32Array(this.numExperts + 1); }
}

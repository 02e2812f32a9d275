// Calls functions of the page's modules, in the folder named by an argument, and prints their results.
import assert from "node:assert";
import path from "node:path";
import { pathToFileURL } from "node:url";

const part = (name) => import(pathToFileURL(path.join(process.argv[2], name)));
const { EventParser, sentenceOf } = await part("stream.js");
const { Alignment } = await part("alignment.js");
const { Trace, UNKNOWN } = await part("trace.js");
const history = await part("history.js");
const palette = await part("palette.js");
const input = JSON.parse(process.argv[3]), results = {};

// ---- events, split at each byte and byte by byte
const parsed = (...parts) => {
  const parser = new EventParser();
  return parts.flatMap((bytes) => parser.add(bytes));
};
const bytes = new TextEncoder().encode(input.stream);
results.events = parsed(bytes);
for (let cut = 0; cut <= bytes.length; cut++) {
  assert.deepEqual(parsed(bytes.slice(0, cut), bytes.slice(cut)), results.events, `cut at ${cut}`);
}
assert.deepEqual(parsed(...[...bytes].map((byte) => Uint8Array.of(byte))), results.events);

results.sentences = input.failures.map((failure) => sentenceOf(...failure));

// ---- alignment of text and tokens, however they are split
const words = (pieces) => {
  const found = [];
  for (const { kind, text, token } of pieces) {
    const last = found.at(-1);
    // A word may come in parts.
    if (last && last[0] === kind && last[2] === token) last[1] += text;
    else found.push([kind, text, token]);
  }
  return found;
};
function aligned({ tokens, texts }, letters) {
  const alignment = new Alignment(), pieces = [];
  const cut = (text) => (letters ? [...text] : [text]);
  let shown = "";
  const take = (isOver) => {
    const taken = alignment.take(isOver);
    pieces.push(...taken);
    shown += taken.map(({ text }) => text).join("");
    return shown + alignment.rest.map(({ text }) => text).join("");
  };
  let came = "";
  if (!letters) alignment.addTokens(tokens);
  for (const [kind, text] of texts) {
    for (const letter of cut(text)) {
      if (letters && tokens.length) alignment.addTokens([tokens.shift()]);
      alignment.addText(kind, letter);
      came += letter;
      assert.equal(take(false), came, "all that came is shown");
    }
  }
  alignment.addTokens(letters ? tokens : []);
  take(true);
  assert.equal(alignment.rest.length, 0);
  return words(pieces);
}
results.aligned = input.answers.map((answer) => aligned(structuredClone(answer), false));
results.by_letters = input.answers.map((answer) => aligned(structuredClone(answer), true));

// ---- routing
const trace = new Trace(2);
for (const chunk of input.routing) trace.add(chunk);
results.ways = Array.from({ length: trace.numTokens }, (_, token) => {
  return Array.from({ length: trace.numLayers }, (_, layer) => trace.expert(token, layer)).map((expert) => {
    return expert === UNKNOWN ? null : expert;
  });
});
results.probability = trace.probability(3, 1);
results.loads = Array.from({ length: trace.numLayers }, (_, layer) => [...trace.loads(layer)]);

// ---- turns
const turns = input.turns.map(([role, content]) => ({ role, content }));
results.messages = history.messagesOf("Be kind.", turns);
results.without_system = history.messagesOf("  ", turns).length;
results.prompt = history.promptOf(turns);
results.before = history.before(turns, turns[2]).map(({ content }) => content);
const call = { id: "c", name: "f", arguments: '{"city": "Paris", "n": [1]}' }, cut = { ...call, arguments: '{"a": ' };
const called = [turns[0], { role: "assistant", content: "", calls: [call, cut] }];
results.calls = history.messagesOf("", called);
results.call_texts = [call, cut, { ...call, arguments: "" }].map(history.callText);
results.tools = [" ", "[]", '[{"name": "f"}]'].map((text) => history.toolsOf(text) ?? null);
assert.throws(() => history.toolsOf("{"), /not a JSON list/);
results.sampling = history.samplingOf(input.settings);

// ---- colors
const numbers = Array.from({ length: palette.NUM_COLOURS }, (_, n) => n);
const steps = Array.from({ length: palette.NUM_STEPS }, (_, n) => n);
results.colours = Object.fromEntries(palette.THEMES.map((theme) => [theme, {
  experts: numbers.map((n) => palette.expertColour(n, theme)),
  ramps: ["probability", "surprise"].map((name) => steps.map((step) => palette.rampColour(name, step, theme))),
}]));
results.classes = [0, 15, 16, 23, 24].map((expert) => palette.expertClass(expert, 24));
results.probability_steps = [0, 0.0999, 0.1, 0.5, 1].map(palette.stepOfProbability);
results.logprob_steps = [0, -0.05, -0.693, -2.303, -4.605, -50, -Infinity].map(palette.stepOfLogprob);
results.only = palette.onlySheet(palette.expertClass(17, 24));
console.log(JSON.stringify(results));

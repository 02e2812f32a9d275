// Calls functions of the page's modules, in the folder that is named, and prints what they give.
import assert from "node:assert";
import path from "node:path";
import { pathToFileURL } from "node:url";

const part = (name) => import(pathToFileURL(path.join(process.argv[2], name)));
const { EventParser, sentenceOf } = await part("stream.js");
const { Alignment } = await part("alignment.js");
const { Trace, UNKNOWN } = await part("trace.js");
const history = await part("history.js");
const palette = await part("palette.js");
const given = JSON.parse(process.argv[3]), told = {};

// ---- events, cut at each byte and byte by byte
const parsed = (...parts) => {
  const parser = new EventParser();
  return parts.flatMap((bytes) => parser.add(bytes));
};
const bytes = new TextEncoder().encode(given.stream);
told.events = parsed(bytes);
for (let cut = 0; cut <= bytes.length; cut++) {
  assert.deepEqual(parsed(bytes.slice(0, cut), bytes.slice(cut)), told.events, `cut at ${cut}`);
}
assert.deepEqual(parsed(...[...bytes].map((byte) => Uint8Array.of(byte))), told.events);

told.sentences = given.failures.map((failure) => sentenceOf(...failure));

// ---- which token wrote what, however it came
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
told.aligned = given.answers.map((answer) => aligned(structuredClone(answer), false));
told.by_letters = given.answers.map((answer) => aligned(structuredClone(answer), true));

// ---- ways
const trace = new Trace(2);
for (const chunk of given.routing) trace.add(chunk);
told.ways = Array.from({ length: trace.numTokens }, (_, token) => {
  return Array.from({ length: trace.numLayers }, (_, layer) => trace.expert(token, layer)).map((expert) => {
    return expert === UNKNOWN ? null : expert;
  });
});
told.probability = trace.probability(3, 1);
told.loads = Array.from({ length: trace.numLayers }, (_, layer) => [...trace.loads(layer)]);

// ---- turns
const turns = given.turns.map(([role, content]) => ({ role, content }));
told.messages = history.messagesOf("Be kind.", turns);
told.without_system = history.messagesOf("  ", turns).length;
told.prompt = history.promptOf(turns);
told.before = history.before(turns, turns[2]).map(({ content }) => content);
told.sampling = history.samplingOf(given.settings);

// ---- colours
const numbers = Array.from({ length: palette.NUM_COLOURS }, (_, n) => n);
const steps = Array.from({ length: palette.NUM_STEPS }, (_, n) => n);
told.colours = Object.fromEntries(palette.THEMES.map((theme) => [theme, {
  experts: numbers.map((n) => palette.expertColour(n, theme)),
  ramps: ["probability", "surprise"].map((name) => steps.map((step) => palette.rampColour(name, step, theme))),
}]));
told.classes = [0, 15, 16, 23, 24].map((expert) => palette.expertClass(expert, 24));
told.probability_steps = [0, 0.0999, 0.1, 0.5, 1].map(palette.stepOfProbability);
told.logprob_steps = [0, -0.05, -0.693, -2.303, -4.605, -50, -Infinity].map(palette.stepOfLogprob);
told.only = palette.onlySheet(palette.expertClass(17, 24));
console.log(JSON.stringify(told));

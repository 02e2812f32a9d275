// An answer: the data received (Answer) and its elements on the page (AnswerView). An answer has thousands of tokens,
// and colors change with each move of the layer slider, so elements are never rebuilt, only repainted.
import { Alignment } from "./alignment.js";
import { callText } from "./history.js";
import { expertClass, stepOfLogprob, stepOfProbability } from "./palette.js";
import { Trace, UNKNOWN } from "./trace.js";

const MAX_PART_TOKENS = 256;  // a browser computes the layout of a whole paragraph at each change in it

export class Answer {
  role = "assistant"; content = ""; thoughts = ""; calls = []; reason = null; trouble = ""; usage = null;
  began = performance.now(); ended = null;

  constructor(numExperts) {
    this.trace = new Trace(numExperts);
    this.alignment = new Alignment();
  }

  // Adds a choice of a chunk, from a chat (delta) or a completion (text).
  take({ delta, text, routing, finish_reason: reason }) {
    const { content = text ?? "", reasoning_content: thoughts, tool_calls: calls = [] } = delta ?? {};
    for (const part of calls) this.#takeCall(part);
    if (routing) {
      this.trace.add(routing);
      this.alignment.addTokens(routing.tokens);
    }
    this.alignment.addText("thoughts", thoughts);
    this.alignment.addText("content", content);
    this.thoughts += thoughts ?? "";
    this.content += content ?? "";
    this.reason = reason ?? this.reason;
  }

  // The first part of a call has its id and name; the arguments arrive in parts.
  #takeCall({ index, id, function: { name, arguments: text = "" } }) {
    this.calls[index] ??= { id, name, arguments: "" };
    this.calls[index].arguments += text;
  }

  end(trouble = "") {
    this.trouble = trouble;
    this.ended = performance.now();
  }

  // Number of tokens, speed, and why the answer ended.
  get summary() {
    const { numTokens } = this.trace, seconds = ((this.ended ?? performance.now()) - this.began) / 1000;
    const count = this.usage?.completion_tokens ?? numTokens;
    const parts = [`${count.toLocaleString("en")} tokens`, `${(count / Math.max(seconds, 1e-3)).toFixed(1)} tokens/s`];
    if (this.usage) parts.push(`${this.usage.prompt_tokens.toLocaleString("en")} prompt tokens`);
    if (this.reason === "length") parts.push("length limit reached");
    if (this.reason === "stopped") parts.push("stopped");
    return parts.join(", ");
  }
}

// Returns the CSS classes of a token's color.
function classOf(trace, token, { view, layer }) {
  if (token < 0 || view === "plain") return "t";
  if (view === "logprob") return `t s-${stepOfLogprob(trace.logprobs[token])}`;
  const expert = trace.expert(token, layer);
  if (expert === UNKNOWN) return "t";
  if (view === "expert" || expert === trace.numExperts) return `t ${expertClass(expert, trace.numExperts)}`;
  return `t p-${stepOfProbability(trace.probability(token, layer))}`;
}

function shortName(trace, token, layer) {
  const expert = trace.expert(token, layer);
  if (expert === UNKNOWN) return "";
  return expert === trace.numExperts ? "skip" : String(expert);
}

// The tokens of the reasoning or the content, in parts, followed by text that is not yet aligned with a token.
class TokenText {
  #part = null; #ending = ""; #rest = document.createElement("span");

  constructor(element) {
    this.element = element;
    element.append(this.#rest);
  }

  append(span) {
    // A part is a block element: it may only end where a line ends.
    const isFull = this.#part?.childElementCount >= MAX_PART_TOKENS && this.#ending.endsWith("\n");
    if (!this.#part || isFull) {
      this.#part = document.createElement("div");
      this.#rest.before(this.#part);
    }
    this.#part.append(span);
    this.#ending = span.textContent;
  }

  // The text is appended to the last part. It must be empty while tokens are appended.
  set rest(text) {
    if (this.#rest.textContent === text) return;
    this.#rest.textContent = text;
    (text && this.#part ? this.#part : this.element).append(this.#rest);
  }
}

export class AnswerView {
  spans = []; #byToken = [];

  constructor(answer, template) {
    this.answer = answer;
    this.element = template.content.firstElementChild.cloneNode(true);
    const [thoughts, content] = this.element.querySelectorAll(".tokens");
    this.texts = { thoughts: new TokenText(thoughts), content: new TokenText(content) };
    this.thoughts = this.element.querySelector(".thoughts");
    this.summary = this.element.querySelector(".actions .hint");
    this.calls = this.element.querySelector(".calls");
    this.note = this.element.querySelector(".note");
    this.element.view = this;
  }

  get isOver() { return this.answer.ended !== null; }

  // Shows what was received since the last update.
  update(look) {
    const { alignment, trouble } = this.answer;
    for (const text of Object.values(this.texts)) text.rest = "";
    for (const piece of alignment.take(this.isOver)) this.#append(piece, look);
    for (const { kind, text } of alignment.rest) this.texts[kind].rest = text;
    this.#showSummary();
    this.#showCalls();
    this.note.hidden = !trouble;
    this.note.textContent = trouble;
    this.element.setAttribute("aria-busy", String(!this.isOver));
  }

  #append({ kind, text, token }, look) {
    const span = Object.assign(document.createElement("span"), { textContent: text, token, view: this });
    // A new line has no width to color.
    if (/^\s*\n\s*$/.test(text)) span.dataset.line = "";
    this.paint(span, look);
    this.texts[kind].append(span);
    this.spans.push(span);
    if (token >= 0) this.#byToken[token] = span;
  }

  #showSummary() {
    const { thoughts, content, trace } = this.answer;
    this.thoughts.hidden = !thoughts;
    if (thoughts) {
      const isThinking = !this.isOver && !content;
      this.thoughts.firstElementChild.textContent = isThinking ? `reasoning, ${trace.numTokens} tokens` : "reasoning";
    }
    this.summary.textContent = trace.numTokens || this.isOver ? this.answer.summary : "waiting for the first token";
  }

  #showCalls() {
    const texts = this.answer.calls.map(callText);
    this.calls.hidden = !texts.length;
    texts.forEach((text, n) => {
      const item = this.calls.children[n] ?? this.calls.appendChild(document.createElement("li"));
      if (item.textContent !== text) item.textContent = text;
    });
  }

  span(token) { return this.#byToken[token]; }

  // Returns the nearest token in a direction that has a text.
  next(token, step) {
    for (let n = token + step; n >= 0 && n < this.answer.trace.numTokens; n += step) {
      if (this.#byToken[n]) return n;
    }
    return token;
  }

  paint(span, look) {
    const { trace } = this.answer, { token } = span;
    const isHere = token >= 0 && look.shown === this && look.token === token;
    const name = classOf(trace, token, look) + (isHere ? " here" : "");
    if (span.className !== name) span.className = name;
    const number = look.numbers && token >= 0 ? shortName(trace, token, look.layer) : "";
    if ((span.dataset.number ?? "") === number) return;
    if (number) span.dataset.number = number;
    else delete span.dataset.number;
  }

  repaint(look) { for (const span of this.spans) this.paint(span, look); }
}

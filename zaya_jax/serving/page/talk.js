// The turns of the conversation on the page, and their buttons: copy, edit, regenerate.
import { AnswerView } from "./answer.js";
import { draw, look } from "./look.js";

const NEAR_END = 80;  // pixels: if the reader has scrolled further up, new text does not scroll the page
const find = (id) => document.getElementById(id);

function copyBySelection(text) {
  const area = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

async function copy(button, text) {
  // Browsers offer the clipboard only to pages from localhost or with HTTPS.
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text);
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}

export class Talk {
  turns = []; #elements = new Map();

  // `on` has the handlers { edit(turn, text), again(answer), changed() }.
  constructor(on) {
    this.element = find("turns");
    this.on = on;
  }

  get views() { return [...this.#elements.values()].map((element) => element.view).filter(Boolean); }

  addUser(content) {
    const turn = { role: "user", content }, element = find("user-turn").content.firstElementChild.cloneNode(true);
    element.querySelector(".text").textContent = content;
    element.querySelector(".edit").addEventListener("click", () => this.#edit(turn, element));
    element.querySelector(".copy").addEventListener("click", (event) => copy(event.target, turn.content));
    this.#add(turn, element);
    this.element.scrollTop = this.element.scrollHeight;
  }

  addAnswer(answer) {
    const view = new AnswerView(answer, find("answer-turn"));
    view.element.querySelector(".again").addEventListener("click", () => this.on.again(answer));
    view.element.querySelector(".copy").addEventListener("click", (event) => copy(event.target, answer.content));
    this.#add(answer, view.element);
    this.update(view);
    return view;
  }

  #add(turn, element) {
    this.turns = [...this.turns, turn];
    this.#elements.set(turn, element);
    this.element.append(element);
    find("welcome").hidden = true;
  }

  // Removes a turn and all later ones.
  cut(turn) {
    const at = this.turns.indexOf(turn);
    for (const each of this.turns.slice(at)) {
      const element = this.#elements.get(each);
      if (look.shown && element.view === look.shown) [look.shown, look.token] = [null, -1];
      element.remove();
      this.#elements.delete(each);
    }
    this.turns = this.turns.slice(0, at);
    find("welcome").hidden = this.turns.length > 0;
    look.shown ??= this.views.at(-1) ?? null;
    this.on.changed();
  }

  update(view) {
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END;
    view.update(look);
    if (isAtEnd) this.element.scrollTop = this.element.scrollHeight;
  }

  repaint() { for (const view of this.views) view.repaint(look); }

  #edit(turn, element) {
    const form = find("editor").content.firstElementChild.cloneNode(true), area = form.querySelector("textarea");
    const children = [...element.children];
    area.value = turn.content;
    element.replaceChildren(form);
    area.focus();
    const leave = () => {
      element.replaceChildren(...children);
      element.querySelector(".edit").focus();
    };
    form.querySelector(".cancel").addEventListener("click", leave);
    form.addEventListener("keydown", (event) => { if (event.key === "Escape") leave(); });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.on.edit(turn, area.value);
    });
  }
}

// Calls the handlers in `on` for pointer and keyboard events on tokens: { token(token, view), layer(layer),
// tip(event, text) }.
export function followTokens(element, on, say) {
  const under = (event) => (event.target.token >= 0 ? event.target : null);
  const point = (event) => {
    const span = under(event);
    if (!span || event.pointerType === "touch") return on.tip(null);
    on.token(span.token, { view: span.view });
    return on.tip(event, say(span.view, span.token));
  };
  element.addEventListener("pointerover", point);
  element.addEventListener("pointerleave", () => on.tip(null));
  element.addEventListener("click", (event) => {
    const span = under(event);
    if (span) on.token(span.token, { view: span.view, isTap: true });
  });
  element.addEventListener("scroll", () => draw(() => on.tip(null)), { passive: true });
  element.addEventListener("keydown", (event) => {
    const view = event.target.matches(".tokens") && event.target.closest("article").view;
    if (view && walk(event.key, view, on)) event.preventDefault();
  });
}

// Moves through tokens (left, right) or layers (up, down). Returns whether the key does so.
export function walk(key, view, on) {
  const last = view.answer.trace.numTokens, here = look.shown === view ? look.token : -1;
  const token = {
    ArrowLeft: () => view.next(here < 0 ? last : here, -1),
    ArrowRight: () => view.next(here, 1),
    Home: () => view.next(-1, 1),
    End: () => view.next(last, -1),
  }[key];
  const step = { ArrowUp: -1, ArrowDown: 1 }[key];
  if (token) on.token(token(), { view, scroll: true, isSpoken: true });
  else if (step) on.layer(look.layer + step, { isSpoken: true });
  return Boolean(token || step);
}

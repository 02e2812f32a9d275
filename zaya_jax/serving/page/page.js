// The page of `zaya serve`: loads the list of models, sends messages, and updates all views when the selection
// (answer, token, layer) changes.
import { Answer } from "./answer.js";
import { Panel } from "./experts.js";
import { messagesOf, promptOf, samplingOf, toolsOf } from "./history.js";
import { draw, look } from "./look.js";
import { expertName, logprobText, onlySheet, percent, styleSheet } from "./palette.js";
import { Server, Trouble } from "./stream.js";
import { followTokens, Talk, walk } from "./talk.js";

const find = (id) => document.getElementById(id);
const FIELDS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const KEY = "zaya.key", TEXT_TOKENS = 200, NEXT_TRY = 2000, LARGEST_SEED = 2 ** 31;
const BROKEN = "Error in this page, see the browser's console; regenerate to try again.";
const narrow = matchMedia("(max-width: 60rem)");
const server = new Server();
let models = [], running = null, again = 0;

const model = () => models[find("model").selectedIndex];
const isChat = () => model()?.zaya?.chat ?? true;

// ---- selection

const on = {
  token(token, { view = look.shown, scroll = false, isTap = false, isSpoken = false } = {}) {
    const before = [look.shown, look.token];
    [look.shown, look.token] = [view, token];
    for (const [each, n] of [before, [view, token]]) {
      const span = each?.span(n);
      if (span) each.paint(span, look);
    }
    if (scroll) view?.span(token)?.scrollIntoView({ block: "nearest" });
    if (isTap && narrow.matches) showPanel(true);
    if (isSpoken) find("status").textContent = say(view, token);
    draw(drawPanel);
  },
  layer(layer, { isSpoken = false } = {}) {
    look.layer = Math.min(Math.max(layer, 0), Number(find("layer").max));
    find("layer").value = look.layer;
    find("layer-name").textContent = look.layer;
    if (isSpoken) find("status").textContent = `layer ${look.layer}`;
    draw(repaint, drawPanel);
  },
  only(name) {
    look.only = look.only === name ? null : name;
    if (look.only) setView("expert");
    draw(drawOnly, drawPanel);
  },
  tip(event, text) {
    const tip = find("tip");
    tip.style.display = event ? "block" : "none";
    if (!event) return;
    tip.textContent = text;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 18, innerHeight - tip.offsetHeight - 8))}px`;
  },
};

function say(view, token) {
  const { trace } = view.answer, expert = trace.expert(token, look.layer);
  const way = trace.numLayers
    ? `\nlayer ${look.layer}: ${expertName(expert, trace.numExperts)}, ${percent(trace.probability(token, look.layer))}`
    : "";
  return `${JSON.stringify(trace.texts[token])}\nlog-probability ${logprobText(trace.logprobs[token])}${way}`;
}

const talk = new Talk({
  edit: async (turn, text) => {
    await stop();
    talk.cut(turn);
    await send(text);
  },
  again: async (answer) => {
    await stop();
    talk.cut(answer);
    await answerNow();
  },
  changed: () => draw(drawPanel),
});
const panel = new Panel(on);
const onlyRules = new CSSStyleSheet(), colours = new CSSStyleSheet();
const repaint = () => talk.repaint();
const drawPanel = () => panel.update();
const drawOnly = () => onlyRules.replaceSync(onlySheet(look.only));

function setView(view) {
  look.view = view;
  document.body.dataset.view = view;
  document.querySelector(`[name=view][value=${view}]`).checked = true;
  if (view !== "expert") look.only = null;
  draw(repaint, drawOnly, drawPanel);
}

function showPanel(isShown) {
  document.body.toggleAttribute("data-panel", isShown);
  find("panel-toggle").setAttribute("aria-expanded", String(isShown));
  draw(drawPanel);
}

// ---- conversation

// Runs an action. If the key is missing or wrong, prompts for one and retries, until the user cancels.
async function withKey(action) {
  for (;;) {
    try {
      return await action();
    } catch (error) {
      if (!error.needsKey || !(await askKey())) throw error;
    }
  }
}

function askKey() {
  const dialog = find("key-dialog");
  if (server.key) {
    find("key-hint").textContent = "The server did not accept this key. Use the one that it was started with.";
  }
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const isGiven = dialog.returnValue === "given";
      if (isGiven) {
        server.key = find("key").value.trim();
        sessionStorage.setItem(KEY, server.key);
      }
      resolve(isGiven);
    }, { once: true });
  });
}

function tellTrouble(sentence) {
  find("trouble").hidden = !sentence;
  find("trouble").textContent = sentence;
}

async function loadModels() {
  try {
    models = await withKey(() => server.models());
    find("model").replaceChildren(...models.map(({ id }) => new Option(id)));
    tellTrouble("");
    useModel();
  } catch (error) {
    if (!(error instanceof Trouble)) throw error;
    tellTrouble(error.message);
    clearTimeout(again);
    if (error.isNotYet) again = setTimeout(loadModels, NEXT_TRY);
  }
}

function useModel() {
  const { num_layers: numLayers = 1 } = model()?.zaya ?? {};
  document.body.dataset.mode = isChat() ? "chat" : "text";
  find("send").textContent = isChat() ? "send" : "continue";
  find("question").placeholder = isChat() ? "message" : "text to continue";
  document.querySelector(".of-tools").hidden = !model()?.zaya?.tools;
  find("layer").max = numLayers - 1;
  find("max_tokens").placeholder = isChat() ? "context" : TEXT_TOKENS;
  on.layer(look.layer);
}

function requestOf() {
  const settings = Object.fromEntries(FIELDS.map((name) => [name, find(name).value]));
  const sampling = samplingOf({ ...settings, stop: find("stop-texts").value });
  // A random seed here makes each answer reproducible from its request, and a regenerated answer different.
  const shared = {
    model: model().id, seed: Math.floor(Math.random() * LARGEST_SEED), stream: true, routing: true,
    stream_options: { include_usage: true },
  };
  if (!isChat()) {
    return ["v1/completions", { ...shared, max_tokens: TEXT_TOKENS, ...sampling, prompt: promptOf(talk.turns) }];
  }
  const chat = { messages: messagesOf(find("system").value, talk.turns), tools: toolsOf(find("tools").value) };
  return ["v1/chat/completions", { ...shared, ...sampling, ...chat }];
}

async function send(text) {
  tellTrouble("");
  if (!model()) await loadModels();
  if (!model()) return;
  const hasWords = isChat() ? text.trim() !== "" : text !== "" || talk.turns.length > 0;
  if (!hasWords) {
    tellTrouble(isChat() ? "Enter a message first." : "Enter a text first: the model continues it.");
    return;
  }
  try {
    toolsOf(find("tools").value);
  } catch (error) {
    tellTrouble(error.message);
    return;
  }
  find("question").value = "";
  if (text) talk.addUser(text);
  await answerNow();
}

async function answerNow() {
  const [path, body] = requestOf(), aborter = new AbortController();
  const answer = new Answer(model().zaya?.num_experts ?? 0), view = talk.addAnswer(answer);
  // A token selected in an older answer stays selected.
  if (look.token < 0) look.shown = view;
  const update = () => {
    talk.update(view);
    if (look.shown === view) panel.update();
  };
  running = { aborter, done: null };
  showRunning(true);
  running.done = receive(answer, () => server.answer(path, body, aborter.signal), () => draw(update));
  try {
    await running.done;
  } finally {
    running = null;
    showRunning(false);
    draw(update);
  }
  find("status").textContent = answer.trouble || `Answer complete: ${answer.summary}.`;
}

async function receive(answer, ask, changed) {
  try {
    await withKey(async () => {
      for await (const { choices, usage } of ask()) {
        if (usage) answer.usage = usage;
        if (choices?.length) answer.take(choices[0]);
        changed();
      }
    });
    answer.end();
  } catch (error) {
    const isStopped = error.name === "AbortError";
    if (isStopped) answer.reason = "stopped";
    answer.end(isStopped ? "" : error instanceof Trouble ? error.message : BROKEN);
    if (answer.trouble === BROKEN) throw error;
  }
}

function showRunning(isRunning) {
  find("stop").hidden = !isRunning;
  find("send").hidden = isRunning;
}

async function stop() {
  const request = running;
  request?.aborter.abort();
  await request?.done;
}

// ---- events

function follow() {
  find("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send(find("question").value);
  });
  find("question").addEventListener("keydown", (event) => {
    const sends = isChat() ? !event.shiftKey : event.ctrlKey || event.metaKey;
    // With input methods, as for Chinese, Enter can end a composed word.
    if (event.key !== "Enter" || event.isComposing || !sends) return;
    event.preventDefault();
    find("ask").requestSubmit();
  });
  find("stop").addEventListener("click", stop);
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
  });
  find("new-chat").addEventListener("click", async () => {
    await stop();
    if (talk.turns.length) talk.cut(talk.turns[0]);
    tellTrouble("");
    find("question").focus();
  });
  find("model").addEventListener("change", useModel);
  find("layer").addEventListener("input", () => on.layer(Number(find("layer").value)));
  find("numbers").addEventListener("change", () => {
    look.numbers = find("numbers").checked;
    draw(repaint);
  });
  for (const choice of document.querySelectorAll("[name=view]")) {
    choice.addEventListener("change", () => setView(choice.value));
  }
  find("panel-toggle").addEventListener("click", () => showPanel(!document.body.hasAttribute("data-panel")));
  find("map").addEventListener("keydown", (event) => {
    if (look.shown && walk(event.key, look.shown, on)) event.preventDefault();
  });
  followTokens(find("turns"), on, say);
  followDialogs();
}

function followDialogs() {
  find("settings-open").addEventListener("click", () => find("settings").showModal());
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      dialog.close("given");
    });
  }
}

document.adoptedStyleSheets = [colours, onlyRules];
colours.replaceSync(styleSheet());
server.key = sessionStorage.getItem(KEY) ?? "";
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(drawPanel));
addEventListener("resize", () => draw(drawPanel));
showPanel(!narrow.matches);
follow();
loadModels();

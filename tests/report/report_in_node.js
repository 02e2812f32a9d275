// Runs the script of a report's page in a minimal fake document, and prints the results.
"use strict";
const page = require("fs").readFileSync(process.argv[2], "utf8");
const [, data] = page.match(/id="data">([\s\S]*?)<\/script>/);
const [, script] = page.match(/<script>([\s\S]*)<\/script>/);
const written = [];
// A drawing context that accepts all calls and records the texts.
const context = new Proxy({}, {
  get: (_, name) => (name === "measureText" ? () => ({ width: 20 }) : (...values) => {
    if (name === "fillText") written.push(values[0]);
  }),
  set: () => true,
});

class Element {
  children = []; style = {}; attributes = {}; listeners = {}; dataset = {}; textContent = ""; value = "steps";
  clientWidth = 562; offsetWidth = 100; offsetHeight = 20;
  append(...children) { this.children.push(...children); }
  setAttribute(name, value) { this.attributes[name] = value; }
  getAttribute(name) { return this.attributes[name]; }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  querySelector(selector) { return (this[selector] ??= new Element()); }
  getContext() { return context; }
}

const made = (values) => Object.assign(new Element(), { dataset: values });
const attributes = (pattern) => [...page.matchAll(pattern)].map((match) => match[1]);
const lists = {
  "figure.chart": attributes(/<figure class="chart" data-column="([^"]*)"/g).map((column) => made({ column })),
  ".maps": attributes(/class="maps" data-run="(\d+)"/g).map((run) => made({ run })),
  "#load-scale": [new Element()],
  "button.chip": attributes(/class="chip [^"]*" data-run="(\d+)"/g).map((run) => made({ run })),
  ".of-run": attributes(/class="of-run" data-run="(\d+)"/g).map((run) => made({ run })),
};
const known = { data: Object.assign(new Element(), { textContent: data }) };
const names = {
  document: {
    documentElement: new Element(),
    getElementById: (id) => (known[id] ??= new Element()),
    querySelectorAll: (selector) => lists[selector],
    createElement: () => new Element(),
    createTextNode: (text) => text,
  },
  ImageData: class { data = { set() {} }; },
  getComputedStyle: () => ({ getPropertyValue: () => "#123456" }),
  matchMedia: () => new Element(),
  addEventListener: () => {},
  innerWidth: 1200,
  innerHeight: 800,
};
const chosen = new Function(...Object.keys(names), `${script}; return chosen;`)(...Object.values(names));

// A chart is 500 wide, after 52 of an axis.
const { tip, axis } = known, told = { written };
const loss = lists["figure.chart"].find((figure) => figure.dataset.column === "loss").querySelector("canvas");
const pointer = (kind, share) => loss.listeners[kind]({ offsetX: 52 + 500 * share, clientX: 0, clientY: 0 });
pointer("pointermove", 2 / 3);
told.pointed = tip.textContent;
lists["button.chip"][0].listeners.click();
pointer("pointermove", 1);
told.hidden = tip.textContent;
if (!lists[".of-run"][0].hidden || lists[".of-run"][1].hidden) throw Error("hides another run");
axis.value = "tokens";
axis.listeners.change();
pointer("pointermove", 1 / 3);
told.tokens = tip.textContent;
pointer("pointerdown", 1 / 3);
pointer("pointermove", 2 / 3);
pointer("pointerup", 2 / 3);
told.zoomed = chosen.window.map(Math.round);
loss.listeners.dblclick();
told.whole = chosen.window;
const [layer, entropy] = lists[".maps"][1].children.map((figure) => figure.children[1]);
const point = (canvas, x, y) => {
  canvas.listeners.pointermove({ offsetX: x, offsetY: y, clientX: 0, clientY: 0 });
  return tip.textContent;
};
told.first_load = point(layer, 10, 3);
told.second_load = point(layer, 550, 3);
told.skipped = point(layer, 550, 40);
told.entropy = point(entropy, 550, 3);
console.log(JSON.stringify(told));

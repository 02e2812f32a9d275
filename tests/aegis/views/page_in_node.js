// Runs the script of a timeline's page in as much of a document as it asks for, and prints what it did.
"use strict";
const page = require("fs").readFileSync(process.argv[2], "utf8");
const [, data] = page.match(/id="data">([\s\S]*?)<\/script>/);
const [, script] = page.match(/<script>([\s\S]*)<\/script>/);

class Element {
  children = []; style = {}; attributes = {}; listeners = {}; dataset = {}; textContent = ""; value = "";
  clientWidth = 1000; offsetWidth = 100; offsetHeight = 20;
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  getBoundingClientRect() { return { left: 0 }; }
  querySelectorAll() { return [lane]; }
  querySelector() { return null; }
  closest() { return this; }
  scrollIntoView() {}
}

const lane = new Element(), known = { data: new Element() }, listeners = {};
lane.dataset.lane = "events";
lane.viewBox = { baseVal: { height: 24 } };
known.data.textContent = data;
const names = {
  document: { getElementById: (id) => (known[id] ??= new Element()), createElement: () => new Element() },
  addEventListener: (kind, listener) => { listeners[kind] = listener; },
  innerWidth: 1200,
  innerHeight: 800,
};
new Function(...Object.keys(names), script)(...Object.values(names));

const { plot, axis, tip, filter, rows } = known, told = {};
const view = () => lane.attributes.viewBox.split(" ").map(Number);
const texts = () => rows.children.map((row) => row.children.map((cell) => cell.textContent));
told.all = { view: view(), ticks: axis.children.map((tick) => [tick.textContent, tick.style.left]), rows: texts() };
plot.listeners.pointermove({ clientX: (1000 * 260) / 350, clientY: 0, target: lane });
told.tip = tip.textContent;
plot.listeners.wheel({ preventDefault() {}, deltaY: -400, clientX: 500 });
told.wheel = view();
plot.listeners.pointerdown({ clientX: 0 });
listeners.pointerup({ clientX: 500 });
told.brush = view();
plot.listeners.dblclick();
told.back = view();
filter.value = "THERE stands";
filter.listeners.input();
told.filtered = texts();
rows.children[0].listeners.click();
told.clicked = view();
console.log(JSON.stringify(told));

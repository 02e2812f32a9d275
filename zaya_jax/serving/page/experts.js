// The panel of one answer: the experts of all its tokens in all layers, the load of each expert in the selected
// layer, and the path of the selected token through the layers.
import { look } from "./look.js";
import { drawLoads, WayMap } from "./maps.js";
import { expertClass, expertName, logprobText, NUM_STEPS, percent } from "./palette.js";
import { UNKNOWN } from "./trace.js";

const MAP_PIXELS = 168, SMALLEST = 2, LARGEST = 12;  // height of the map, limits of a cell's size
const find = (id) => document.getElementById(id);
const between = (low, value, high) => Math.min(Math.max(value, low), high);

function made(tag, className, text = "") {
  return Object.assign(document.createElement(tag), { className, textContent: text });
}

export class Panel {
  #map = new WayMap(find("map").querySelector("canvas")); #cell = [1, 1]; #loads = []; #way = []; #seen = {};

  // `on` has the handlers { token(token), layer(layer), only(name), tip(event, text) }.
  constructor(on) {
    this.on = on;
    const map = find("map-clip"), loads = find("load-map");
    map.addEventListener("pointermove", (event) => this.#pointMap(event));
    map.addEventListener("pointerleave", () => on.tip(null));
    map.addEventListener("click", (event) => {
      const place = this.#placeOf(event);
      if (place) [on.layer(place.layer), on.token(place.token, { scroll: true })];
    });
    loads.addEventListener("pointermove", (event) => this.#pointLoads(event));
    find("all-loads").addEventListener("toggle", () => this.update());
    this.#makeRamp();
  }

  get #trace() { return look.shown?.answer.trace; }

  // Updates all parts; elements that did not change are not touched.
  update() {
    const trace = this.#trace, isSeen = Boolean(trace?.numLayers);
    find("none").hidden = isSeen;
    find("seen").hidden = !isSeen;
    if (!isSeen) return;
    this.#drawMap(trace);
    this.#drawLoads(trace);
    this.#showToken(trace);
  }

  #drawMap(trace) {
    this.#map.update(trace, look.view);
    const { canvas, stride, numColumns } = this.#map, style = find("map-clip").style;
    this.#cell = [
      between(SMALLEST, Math.floor(find("map").clientWidth / numColumns), LARGEST),
      between(SMALLEST, Math.floor(MAP_PIXELS / trace.numLayers), LARGEST),
    ];
    const [width, height] = this.#cell;
    [canvas.style.width, canvas.style.height] = [`${canvas.width * width}px`, `${canvas.height * height}px`];
    [style.width, style.height] = [`${numColumns * width}px`, `${trace.numLayers * height}px`];
    const rest = stride > 1 ? `, every ${stride}th drawn` : "";
    find("map-name").textContent = `${trace.numTokens.toLocaleString("en")} tokens, left to right${rest}`;
    const [row, column] = [find("map-layer"), find("map-token")];
    [row.style.top, row.style.height] = [`${look.layer * height}px`, `${height}px`];
    column.hidden = look.token < 0;
    [column.style.left, column.style.width] = [`${Math.floor(look.token / stride) * width}px`, `${width}px`];
    this.#scrollMap(Math.floor(look.token / stride), numColumns, width);
    find("ramp").hidden = look.view === "expert" || look.view === "plain";
    find("ramp").className = look.view === "logprob" ? "hint s" : "hint p";
    find("ramp-low").textContent = look.view === "logprob" ? "tokens: certain" : "router: 0\u202f%";
    find("ramp-high").textContent = look.view === "logprob" ? "1 in 20,000" : "100\u202f%";
  }

  // Scrolls to the selected token; if there is none, to the end of a growing map.
  #scrollMap(column, numColumns, width) {
    if (this.#seen.token === look.token && this.#seen.numColumns === numColumns) return;
    const map = find("map"), place = column * width, left = map.scrollLeft;
    const isInSight = place >= left && place < left + map.clientWidth;
    if (look.token < 0) map.scrollLeft = numColumns * width;
    else if (this.#seen.token !== look.token && !isInSight) map.scrollLeft = place - map.clientWidth / 2;
    this.#seen = { token: look.token, numColumns };
  }

  #makeRamp() {
    const steps = Array.from({ length: NUM_STEPS }, (_, n) => [made("i", `p-${n}`), made("i", `s-${n}`)]);
    find("ramp-steps").append(...steps.flat());
  }

  #drawLoads(trace) {
    if (this.#loads.length !== trace.numExperts + 1) this.#makeLoads(trace.numExperts);
    const loads = trace.loads(look.layer), total = Math.max(loads.reduce((sum, each) => sum + each, 0), 1);
    const most = Math.max(...loads, 1);
    find("load-layer").textContent = look.layer;
    this.#loads.forEach(({ button, bar, count }, expert) => {
      bar.style.width = `${(100 * loads[expert]) / most}%`;
      count.textContent = loads[expert] ? `${loads[expert]}` : "\u2013";
      button.title = `${expertName(expert, trace.numExperts)}: ${loads[expert]} of ${total} tokens, `
        + percent(loads[expert] / total);
      button.setAttribute("aria-pressed", String(look.only === button.dataset.only));
    });
    if (find("all-loads").open) drawLoads(find("load-map"), trace);
  }

  #makeLoads(numExperts) {
    const items = Array.from({ length: numExperts + 1 }, (_, expert) => {
      const name = expertClass(expert, numExperts), button = made("button", "load");
      const bar = made("i", name), count = made("span", "count"), track = made("span", "track");
      [button.type, button.dataset.only] = ["button", name];
      track.append(bar);
      button.append(made("span", `swatch ${name}`, expert === numExperts ? "skip" : String(expert)), track, count);
      button.addEventListener("click", () => this.on.only(button.dataset.only));
      const item = made("li", "");
      item.append(button);
      return { item, button, bar, count };
    });
    this.#loads = items;
    find("loads").replaceChildren(...items.map(({ item }) => item));
  }

  #showToken(trace) {
    const { token } = look, isOne = token >= 0 && token < trace.numTokens;
    find("token-hint").hidden = isOne;
    find("token-text").hidden = find("way").hidden = !isOne;
    if (!isOne) return;
    find("token-text").replaceChildren(
      made("code", "", JSON.stringify(trace.texts[token]).slice(1, -1).replace(/^ | $/g, "\u2423") || "(no text)"),
      ` ${(token + 1).toLocaleString("en")} of ${trace.numTokens.toLocaleString("en")}, `
        + `log-probability ${logprobText(trace.logprobs[token])}`,
    );
    if (this.#way.length !== trace.numLayers) this.#makeWay(trace.numLayers);
    this.#way.forEach((row, layer) => this.#showLayer(row, trace, token, layer));
  }

  #showLayer({ item, swatch, bar, share }, trace, token, layer) {
    const expert = trace.expert(token, layer), p = trace.probability(token, layer);
    const name = expert === UNKNOWN ? "" : expertClass(expert, trace.numExperts);
    swatch.className = `swatch ${name}`;
    swatch.textContent = expert === UNKNOWN ? "?" : expert === trace.numExperts ? "skip" : expert;
    bar.className = name;
    bar.style.width = `${100 * (p || 0)}%`;
    share.textContent = expert === UNKNOWN ? "not routed" : percent(p);
    item.setAttribute("aria-current", String(layer === look.layer));
  }

  #makeWay(numLayers) {
    this.#way = Array.from({ length: numLayers }, (_, layer) => {
      const item = made("li", ""), button = made("button", "layer", String(layer)), track = made("span", "track");
      const swatch = made("span", "swatch"), bar = made("i", ""), share = made("span", "count");
      button.type = "button";
      button.setAttribute("aria-label", `select layer ${layer}`);
      button.addEventListener("click", () => this.on.layer(layer));
      track.append(bar);
      item.append(button, swatch, track, share);
      return { item, swatch, bar, share };
    });
    find("way").replaceChildren(...this.#way.map(({ item }) => item));
  }

  // Returns the token and layer under the pointer.
  #placeOf(event) {
    const trace = this.#trace, box = find("map-clip").getBoundingClientRect(), [width, height] = this.#cell;
    const token = Math.floor((event.clientX - box.left) / width) * this.#map.stride;
    const layer = Math.floor((event.clientY - box.top) / height);
    const isInside = token >= 0 && token < trace.numTokens && layer >= 0 && layer < trace.numLayers;
    return isInside ? { token, layer } : null;
  }

  #pointMap(event) {
    const place = this.#placeOf(event), trace = this.#trace;
    if (!place) return this.on.tip(null);
    const { token, layer } = place, expert = trace.expert(token, layer);
    const name = expertName(expert, trace.numExperts), p = percent(trace.probability(token, layer));
    return this.on.tip(event, `${JSON.stringify(trace.texts[token])}, layer ${layer}\n${name}, ${p}`);
  }

  #pointLoads(event) {
    const trace = this.#trace, box = event.target.getBoundingClientRect();
    const at = (share, length) => between(0, Math.floor(share * length), length - 1);
    const layer = at((event.clientX - box.left) / box.width, trace.numLayers);
    const expert = at((event.clientY - box.top) / box.height, trace.numExperts + 1);
    const count = trace.loads(layer)[expert];
    find("load-told").textContent = `layer ${layer}, ${expertName(expert, trace.numExperts)}: ${count} tokens`;
  }
}

// The user's controls, and the charts that depend on them.
const all = (selector) => [...document.querySelectorAll(selector)];
const pictures = [
  ...all("figure.chart").map((figure) => new Curves(figure)),
  ...all(".maps").flatMap(mapsOf),
  ...all("#load-scale").map((parent) => new LoadScale(parent)),
];

function drawAll() {
  for (const picture of pictures) picture.draw();
}

// A hidden run is hidden in all sections; hidden canvases have no width and are drawn when shown again.
function toggle(chip) {
  const number = Number(chip.dataset.run), isShown = chosen.hidden.has(number);
  if (isShown) chosen.hidden.delete(number); else chosen.hidden.add(number);
  chip.setAttribute("aria-pressed", isShown ? "true" : "false");
  for (const part of all(".of-run")) part.hidden = chosen.hidden.has(Number(part.dataset.run));
  drawAll();
}

for (const chip of all("button.chip")) chip.addEventListener("click", () => toggle(chip));
find("axis").addEventListener("change", () => {
  chosen.axis = find("axis").value;
  chosen.window = null;
  drawAll();
});
find("smoothing").addEventListener("input", () => {
  chosen.smoothing = Number(find("smoothing").value);
  drawAll();
});
addEventListener("resize", drawAll);
isDark.addEventListener("change", drawAll);
drawAll();

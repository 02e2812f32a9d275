// Background colors of tokens. The sixteen colors of experts maximize the smallest pairwise distance in OKLab, for
// normal and for color-blind vision [CVD], among the colors on which text has a contrast of at least 5. The first few
// are the furthest apart.
const EXPERTS = {
  light: ["#f5dc3a", "#9982f8", "#d0860b", "#81e2f3", "#3f9db7", "#d49a99", "#29c4fe", "#93de82",
    "#e86494", "#9aaa65", "#8affd8", "#c3cabd", "#8cb2bf", "#fa92f1", "#e2b93a", "#dcefa7"],
  dark: ["#317a1e", "#4e156e", "#aa49a4", "#790701", "#9e1b55", "#5c3fb0", "#85646d", "#2c6acf",
    "#105e62", "#691b47", "#7e478a", "#534a40", "#144775", "#23411c", "#415d1e", "#2f1c8b"],
};
// End colors of the ramps, which start at the page's background. Probabilities are blue, unlikely tokens orange.
const RAMPS = {
  light: { back: "#ffffff", skip: "#e4e7ec", stripe: "#aab2c0", probability: "#5aa0ef", surprise: "#f08a3c" },
  dark: { back: "#12161d", skip: "#232b37", stripe: "#566274", probability: "#1d63b8", surprise: "#a84a10" },
};
export const NUM_COLOURS = 16, NUM_STEPS = 10;
export const THEMES = ["light", "dark"];

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const hexOf = (rgb) => `#${rgb.map((each) => Math.round(each).toString(16).padStart(2, "0")).join("")}`;
const mix = (from, to, share) => {
  const [a, b] = [channels(from), channels(to)];
  return hexOf(a.map((each, n) => each + share * (b[n] - each)));
};

export const stepOfProbability = (p) => Math.min(Math.floor(p * NUM_STEPS), NUM_STEPS - 1);
// The square root spreads likely tokens, between 99 % and 10 %, over several steps: most tokens are among them.
const MAX_NATS = 10;
export function stepOfLogprob(logprob) {
  const nats = Math.min(Math.max(-logprob, 0), MAX_NATS);
  return Math.min(Math.floor(NUM_STEPS * Math.sqrt(nats / MAX_NATS)), NUM_STEPS - 1);
}

export const expertColour = (expert, theme) => EXPERTS[theme][expert % NUM_COLOURS];
export const skipColour = (theme) => RAMPS[theme].stripe;
export const rampColour = (name, step, theme) => {
  return mix(RAMPS[theme].back, RAMPS[theme][name], step / (NUM_STEPS - 1));
};

// Returns the CSS classes of an expert's background. Beyond sixteen experts the colors repeat, with a line below,
// above or both.
export const expertClass = (expert, numExperts) => {
  if (expert >= numExperts) return "x-skip";
  return `x-${expert % NUM_COLOURS} round-${Math.min(Math.floor(expert / NUM_COLOURS), 3)}`;
};

function rulesOf(theme) {
  const { skip, stripe } = RAMPS[theme];
  const rule = (name, background) => `.${name} { background: ${background}; }`;
  const steps = Array.from({ length: NUM_STEPS }, (_, step) => step);
  return [
    ...EXPERTS[theme].map((colour, n) => rule(`x-${n}`, colour)),
    rule("x-skip", `repeating-linear-gradient(-45deg, ${skip} 0 4px, ${stripe} 4px 5px)`),
    ...steps.map((step) => rule(`p-${step}`, rampColour("probability", step, theme))),
    ...steps.map((step) => rule(`s-${step}`, rampColour("surprise", step, theme))),
  ].join("\n");
}

export const styleSheet = () => `${rulesOf("light")}
@media (prefers-color-scheme: dark) {
${rulesOf("dark")}
}`;

// Fades all tokens but those of a highlighted expert.
export const onlySheet = (name) => (name ? `.t:not(.${name.split(" ").join(".")}) { opacity: .3; }` : "");

const fixed = (number, digits) => number.toFixed(digits).replace("-", "\u2212");
export const percent = (p) => (Number.isNaN(p) ? "unknown" : `${(100 * p).toFixed(p < 0.1 ? 1 : 0)}\u202f%`);
export const expertName = (expert, numExperts) => {
  if (expert === 0xffff) return "not routed";
  return expert >= numExperts ? "skip" : `expert ${expert}`;
};
export const logprobText = (logprob) => {
  return Number.isNaN(logprob) ? "unknown" : `${fixed(logprob, 2)} (${percent(Math.exp(logprob))})`;
};

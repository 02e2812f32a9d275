// What was said so far, as a list of turns { role, content }, and what a request makes of it. Nothing here is
// changed in place: a turn that is written anew takes all behind it away.

// A question whose answer never got a word is left out with it: templates want the roles to alternate.
function answered(turns) {
  return turns.filter((turn, n) => {
    const answer = turn.role === "user" ? turns[n + 1] : turn;
    return answer === undefined || answer.content !== "";
  });
}

// Thoughts are not sent back: the model's template drops those of earlier answers.
export function messagesOf(system, turns) {
  const said = answered(turns).map(({ role, content }) => ({ role, content }));
  return system.trim() ? [{ role: "system", content: system }, ...said] : said;
}

// For a model without a chat template all is one text, and every character of it counts.
export const promptOf = (turns) => turns.map((turn) => turn.content).join("");

export const before = (turns, turn) => turns.slice(0, turns.indexOf(turn));

// Empty fields are left to the server.
export function samplingOf(settings) {
  const numbers = ["temperature", "top_p", "top_k", "max_tokens", "seed"]
    .map((name) => [name, String(settings[name] ?? "").trim()])
    .filter(([, text]) => text !== "")
    .map(([name, text]) => [name, Number(text)]);
  // One a line; \n within one is a new line, which a line cannot hold.
  const stop = String(settings.stop ?? "").split("\n").filter(Boolean)
    .map((text) => text.replace(/\\(n|t|\\)/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]));
  return { ...Object.fromEntries(numbers), ...(stop.length && { stop }) };
}

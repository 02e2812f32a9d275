// The conversation as a list of turns { role, content }, and its form in a request. Lists are never changed in
// place: editing a turn removes all later ones.

// Omits a question whose answer stayed empty, together with the answer: templates require alternating roles.
function answered(turns) {
  return turns.filter((turn, n) => {
    const answer = turn.role === "user" ? turns[n + 1] : turn;
    return answer === undefined || answer.content !== "";
  });
}

// Reasoning is not sent back: the model's template drops that of earlier answers.
export function messagesOf(system, turns) {
  const messages = answered(turns).map(({ role, content }) => ({ role, content }));
  return system.trim() ? [{ role: "system", content: system }, ...messages] : messages;
}

// Without a chat template the conversation is one text, of which every character counts.
export const promptOf = (turns) => turns.map((turn) => turn.content).join("");

export const before = (turns, turn) => turns.slice(0, turns.indexOf(turn));

// Empty fields use the server's default.
export function samplingOf(settings) {
  const numbers = ["temperature", "top_p", "top_k", "max_tokens", "seed"]
    .map((name) => [name, String(settings[name] ?? "").trim()])
    .filter(([, text]) => text !== "")
    .map(([name, text]) => [name, Number(text)]);
  // One stop string per line; a new line within one is written as \n.
  const stop = String(settings.stop ?? "").split("\n").filter(Boolean)
    .map((text) => text.replace(/\\(n|t|\\)/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]));
  return { ...Object.fromEntries(numbers), ...(stop.length && { stop }) };
}

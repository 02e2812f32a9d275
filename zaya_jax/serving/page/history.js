// The conversation as a list of turns { role, content, calls }, and its form in a request. Lists are never changed in
// place: editing a turn removes all later ones.

// Omits a question whose answer stayed empty, together with the answer: templates require alternating roles.
function answered(turns) {
  return turns.filter((turn, n) => {
    const answer = turn.role === "user" ? turns[n + 1] : turn;
    return answer === undefined || answer.content !== "" || Boolean(answer.calls?.length);
  });
}

// Reasoning is not sent back: the model's template drops that of earlier answers.
export function messagesOf(system, turns) {
  const messages = answered(turns).map(({ role, content, calls }) =>
    (calls?.length ? { role, content, tool_calls: calls.map(callOf) } : { role, content }));
  return system.trim() ? [{ role: "system", content: system }, ...messages] : messages;
}

// A call that was cut has incomplete arguments, which no template can write.
function callOf({ id, name, arguments: text }) {
  return { id, type: "function", function: { name, arguments: parsed(text) === null ? "{}" : text } };
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

// A call as code: get_weather(city: "Paris", days: 3). Arguments that are not complete yet are shown as they are.
export function callText({ name, arguments: text }) {
  const values = parsed(text);
  if (values === null) return `${name}(${text}`;
  return `${name}(${Object.entries(values).map(([each, value]) => `${each}: ${JSON.stringify(value)}`).join(", ")})`;
}

// Returns the tools of a text in JSON; undefined without any. Throws an error with a sentence for the user.
export function toolsOf(text) {
  if (!text.trim()) return undefined;
  const tools = parsed(text);
  if (!Array.isArray(tools)) throw new Error("The tools in the settings are not a JSON list.");
  return tools.length ? tools : undefined;
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

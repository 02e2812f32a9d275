// Client of the server: the list of models, streamed answers, and a message for every error.
const MODELS_TIMEOUT = 20_000;  // milliseconds

// Parses server-sent events. The network may split the bytes anywhere: within a character, or between CR and LF.
export class EventParser {
  #decoder = new TextDecoder(); #rest = ""; #data = [];

  add(bytes) {
    // A CR at the end may be the first half of CR LF: keep it until the next bytes arrive.
    const lines = (this.#rest + this.#decoder.decode(bytes, { stream: true })).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    return lines.flatMap((line) => this.#take(line));
  }

  #take(line) {
    if (line === "") {
      const event = this.#data.splice(0);
      return event.length ? [event.join("\n")] : [];
    }
    const [, name, value] = line.match(/^([^:]*):? ?(.*)$/s);
    if (name === "data") this.#data.push(value);
    return [];
  }
}

// An error with a message for the user.
export class Trouble extends Error {
  constructor(message, status = 0) {
    super(message);
    this.needsKey = status === 401;
    this.isNotYet = status === 503;  // the server is still loading its model
  }
}

const ended = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);
export function sentenceOf(status, message, retryAfter) {
  const said = message ? ended(`Server error: ${message}`) : "";
  if (status === 401) return "The server requires its key: use the one that it was started with.";
  if (status === 429) {
    return `The server's queue is full; try again ${retryAfter ? `in ${retryAfter} s` : "in a moment"}.`;
  }
  if (status === 404) return said || "Unknown URL: the server has another version than this page. Reload the page.";
  if (status === 503) return `${said || "The server is not ready."} Try again in a moment.`;
  if (status < 500) return said || `The server refused the request (${status}): check the settings.`;
  return `${said || `The server failed (${status}).`} See its log; regenerate to try again.`;
}

// FastAPI and others have `detail` instead of OpenAI's `error`.
function messageOf(text) {
  try {
    const { error, detail } = JSON.parse(text);
    return String(error?.message ?? error ?? detail ?? "");
  } catch {
    return "";
  }
}

const LATE = `The server did not list its models within ${MODELS_TIMEOUT / 1000} s; reload to try again.`;
const STRANGER = "This URL is not served by zaya serve; it prints its URL when it starts.";
const UNREACHABLE = "The server does not answer; check that zaya serve is running, and try again.";
const CUT = "The connection ended before the answer was complete; regenerate to try again.";

export class Server {
  key = "";

  async #fetch(path, options) {
    const headers = { "Content-Type": "application/json", ...(this.key && { Authorization: `Bearer ${this.key}` }) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Trouble(error.name === "TimeoutError" ? LATE : UNREACHABLE);
    }
    if (response.ok) return response;
    const sentence = sentenceOf(
      response.status, messageOf(await response.text()), response.headers.get("Retry-After"));
    throw new Trouble(sentence, response.status);
  }

  async models() {
    const response = await this.#fetch("v1/models", { signal: AbortSignal.timeout(MODELS_TIMEOUT) });
    const { data } = await response.json().catch(() => ({}));
    if (!Array.isArray(data)) throw new Trouble(STRANGER);
    return data;
  }

  // Yields the chunks of an answer. Throws an AbortError if `signal` aborts, and a Trouble for any other early end.
  async *answer(path, body, signal) {
    const response = await this.#fetch(path, { method: "POST", body: JSON.stringify(body), signal });
    const reader = response.body.getReader(), parser = new EventParser();
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) throw new Trouble(CUT);
        for (const event of parser.add(value)) {
          if (event === "[DONE]") return;
          const chunk = JSON.parse(event);
          if (chunk.error) throw new Trouble(sentenceOf(500, messageOf(event)));
          yield chunk;
        }
      }
    } catch (error) {
      if (error instanceof Trouble || error.name === "AbortError") throw error;
      throw new Trouble(CUT);
    } finally {
      reader.cancel().catch(() => {});  // fails if the connection is already closed
    }
  }
}

// What the server says: its models, and answers that come in events; what went wrong, in one sentence each.
const LONGEST_WAIT = 20_000;  // milliseconds that a list of models may take

// Server-sent events out of bytes, wherever the network cut them: within a character, or between CR and LF.
export class EventParser {
  #decoder = new TextDecoder(); #rest = ""; #data = [];

  add(bytes) {
    // A CR at the end may be the first half of a line's end: it waits for what follows.
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

// A mistake that a reader can do something about; its message is the sentence.
export class Trouble extends Error {
  constructor(sentence, status = 0) {
    super(sentence);
    this.needsKey = status === 401;
    this.isNotYet = status === 503;  // the server is still reading its run
  }
}

const ended = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);
export function sentenceOf(status, message, retryAfter) {
  const said = message ? ended(`The server says: ${message}`) : "";
  if (status === 401) return "The server asks for its key: give the one it was started with.";
  if (status === 429) {
    return `Too many requests wait at the server; try again ${retryAfter ? `in ${retryAfter} s` : "in a moment"}.`;
  }
  if (status === 404) return said || "The server does not know this address: it is of another version than this page.";
  if (status === 503) return `${said || "The server is not ready."} Try again in a moment.`;
  if (status < 500) return said || `The server refuses the request (${status}): look at the settings.`;
  return `${said || `The server failed (${status}).`} Its terminal says more; regenerate to try again.`;
}

// `detail` is what FastAPI and others say in place of OpenAI's `error`.
function messageOf(text) {
  try {
    const { error, detail } = JSON.parse(text);
    return String(error?.message ?? error ?? detail ?? "");
  } catch {
    return "";
  }
}

const LATE = `The server does not say which models it has within ${LONGEST_WAIT / 1000} s; reload to try again.`;
const STRANGER = "What answers at this address is not zaya serve; see its terminal for the right one.";
const UNREACHABLE = "The server does not answer; see whether zaya serve still runs, and try again.";
const CUT = "The connection ended before the answer did; regenerate to try again.";

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
    const response = await this.#fetch("v1/models", { signal: AbortSignal.timeout(LONGEST_WAIT) });
    const { data } = await response.json().catch(() => ({}));
    if (!Array.isArray(data)) throw new Trouble(STRANGER);
    return data;
  }

  // The chunks of an answer. An abort of `signal` is thrown on; every other end but the proper one is a Trouble.
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
      reader.cancel().catch(() => {});  // of a connection that is gone there is nothing to cancel
    }
  }
}

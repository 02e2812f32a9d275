// Aligns the text of an answer with its tokens. The server sends the text without its marks (<think>, the end token,
// a stop string), and separately what each token added. The pieces of both need not end at the same place.
const MAX_LOOKAHEAD = 16;  // number of tokens that are tried for one that fits

// Returns how many characters of `text` a token covers: 0 if it does not fit, null if more text is needed.
function fit(token, text, isAtStart) {
  if (text.startsWith(token)) return token.length;
  if (token.startsWith(text)) return null;
  // The server may drop white space where the reasoning or the content begins.
  const bare = isAtStart ? token.trimStart() : "";
  return bare && text.startsWith(bare) ? bare.length : 0;
}

export class Alignment {
  #tokens = []; #next = 0; #texts = []; #kind = null;

  addTokens(tokens) { this.#tokens.push(...tokens); }

  addText(kind, text) {
    if (!text) return;
    const last = this.#texts.at(-1);
    if (last?.kind === kind) last.text += text;
    else this.#texts.push({ kind, text });
  }

  // Returns the aligned pieces: { kind, text, token }, with token -1 if no token covers the text.
  take(isOver = false) {
    const pieces = [];
    while (this.#texts.length) {
      const [first] = this.#texts, { kind, text } = first;
      // Once another kind of text has begun, this one is complete.
      const isWhole = isOver || this.#texts.length > 1;
      const match = this.#find(text, isWhole, kind !== this.#kind);
      if (!match && !isWhole) break;
      const { length, token } = match ?? { length: text.length, token: -1 };
      pieces.push({ kind, text: text.slice(0, length), token });
      this.#kind = kind;
      first.text = text.slice(length);
      if (first.text === "") this.#texts.shift();
    }
    return pieces;
  }

  // The received text that is not aligned yet.
  get rest() { return this.#texts.map(({ kind, text }) => ({ kind, text, token: -1 })); }

  // Returns the next token that covers the beginning of the text; null if it has not arrived yet.
  #find(text, isWhole, isAtStart) {
    // Tokens without text are skipped: a tool call has any number of them.
    let tried = 0, token = this.#next;
    for (; token < this.#tokens.length && tried < MAX_LOOKAHEAD; token++) {
      if (this.#tokens[token] === "") continue;
      tried++;
      const length = fit(this.#tokens[token], text, isAtStart) ?? (isWhole ? text.length : null);
      if (length === null) return null;
      if (length === 0) continue;
      this.#next = token + 1;
      return { length, token };
    }
    // White space that the template wrote precedes the first token.
    const length = isAtStart && tried ? text.length - text.trimStart().length : 0;
    if (length) return { length, token: -1 };
    // No token in reach covers this character. Skip it, so that the following ones can be aligned.
    return tried < MAX_LOOKAHEAD ? null : { length: text.codePointAt(0) > 0xffff ? 2 : 1, token: -1 };
  }
}

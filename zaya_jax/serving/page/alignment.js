// Which token wrote which part of an answer. The server gives the text, without what only marks it (<think>, the
// end, a stop string), and beside it what each token added; both come in pieces that need not end together.
const FURTHEST = 16;  // tokens that are looked at for one that fits

// How much of `text` a token accounts for: 0 if it does not fit, null if only more text can tell.
function fit(token, text, isAtStart) {
  if (text.startsWith(token)) return token.length;
  if (token.startsWith(text)) return null;
  // Where thoughts or the answer begin, the server may leave out white space.
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

  // The pieces that are certain: { kind, text, token }, with token -1 where none wrote it.
  take(isOver = false) {
    const pieces = [];
    while (this.#texts.length) {
      const [first] = this.#texts, { kind, text } = first;
      // Of a kind of text that has ended no more comes.
      const isWhole = isOver || this.#texts.length > 1;
      const found = this.#find(text, isWhole, kind !== this.#kind);
      if (!found && !isWhole) break;
      const { length, token } = found ?? { length: text.length, token: -1 };
      pieces.push({ kind, text: text.slice(0, length), token });
      this.#kind = kind;
      first.text = text.slice(length);
      if (first.text === "") this.#texts.shift();
    }
    return pieces;
  }

  // What came and is not certain yet.
  get rest() { return this.#texts.map(({ kind, text }) => ({ kind, text, token: -1 })); }

  // The first token from here on that wrote the beginning of the text; null if none has come.
  #find(text, isWhole, isAtStart) {
    const last = Math.min(this.#tokens.length, this.#next + FURTHEST);
    for (let token = this.#next; token < last; token++) {
      if (this.#tokens[token] === "") continue;
      const length = fit(this.#tokens[token], text, isAtStart) ?? (isWhole ? text.length : null);
      if (length === null) return null;
      if (length === 0) continue;
      this.#next = token + 1;
      return { length, token };
    }
    // White space that the template has written, before the first token.
    const length = isAtStart && last > this.#next ? text.length - text.trimStart().length : 0;
    if (length) return { length, token: -1 };
    // So many that do not fit: no token wrote this character, and those behind it shall find their places.
    return last - this.#next < FURTHEST ? null : { length: text.codePointAt(0) > 0xffff ? 2 : 1, token: -1 };
  }
}

"""Masks, compared with a search of the vocabulary, and the phases of a text: thought, answer, end."""

import functools
import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from random_schemas import SchemaWriter
from tokenizers import decoders, models, normalizers

from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.errors import UserError
from zaya_jax.inference.engine.text_stream import TextWriter
from zaya_jax.inference.structured import compiler as compiler_module
from zaya_jax.inference.structured import grammar_process
from zaya_jax.inference.structured.compiler import GrammarCompiler
from zaya_jax.inference.structured.constraint import Constraint, all_tokens, fill_masks
from zaya_jax.inference.structured.grammar import grammar_of, json_schema_grammar

TOKENIZER = load_tokenizer("byte-chat")
VOCAB_SIZE = 272
EOS, END, THINK, THINK_END = 1, 260, 261, 262


@functools.cache
def compiler():
    return GrammarCompiler(TOKENIZER, VOCAB_SIZE)


def mask_of(state, vocab_size=VOCAB_SIZE):
    """The allowed tokens of a text."""
    mask_BW = all_tokens(2, vocab_size)
    assert fill_masks({1: state}, mask_BW) == {}
    assert np.all(mask_BW[0] == 0xFFFFFFFF), "other rows stay as they are"
    bits = np.unpackbits(mask_BW[1].view(np.uint8), bitorder="little")[:vocab_size]
    return set(np.flatnonzero(bits).tolist())


def byte_tokens(text):
    return set(TOKENIZER.encode(text))


def write(state, text):
    for token in TOKENIZER.encode(text):
        assert token in mask_of(state), (text, token)
        state.advance(token)


# Regular expressions, for which Python's `re` says which bytes are the beginning of a match: all matches are
# listed, because the languages are finite.
LANGUAGES = {
    "(ab|abc|b)c?": ["ab", "abc", "abcc", "b", "bc"],
    "x{1,3}y": ["xy", "xxy", "xxxy"],
    "(a|aa)(b|)(c|cd)": [a + b + c for a in ("a", "aa") for b in ("b", "") for c in ("c", "cd")],
    "é(é|ü)": ["éé", "éü"],
    '"(a|b)": [01]': [f'"{a}": {b}' for a in "ab" for b in "01"],
}
LETTERS = ["a", "b", "c", "d", "x", "y", '"', " ", ":", "0", "1", "é", "ü"]
LONGER = ["aa", "ab", "bc", "xx", "xxy", "abcc", "cd", '"a', '": ', ": ", '": 1', "éé", ""]
PARTS = ["é".encode()[:1], "é".encode()[1:], "ü".encode()[1:]]
"""Tokens that are a part of a character."""


@pytest.mark.parametrize("pattern", LANGUAGES)
def test_masks_equal_a_search_of_the_vocabulary(pattern):
    """At every state that tokens can reach."""
    matches = [text.encode() for text in LANGUAGES[pattern]]
    assert all(re.fullmatch(pattern, text) for text in LANGUAGES[pattern])
    tokens = [*(each.encode() for each in (*LETTERS, *LONGER)), *PARTS]
    # Special tokens have no bytes.
    tokens += [b"", b""]
    special = [len(tokens) - 2, len(tokens) - 1]
    vocabulary = grammar_process.load_vocabulary(grammar_process.Vocabulary(tokens, special[1]))
    source = grammar_of(f"start: /{pattern}/", {}).source
    matcher = grammar_process.compile_grammar(vocabulary, source)
    assert matcher.get_error() == ""
    ends = (special[1],)
    unread = [()]
    while unread:
        path = unread.pop()
        state = Constraint(matcher, len(tokens), special[1]).start((), ends)
        for token in path:
            state.advance(token)
        written = b"".join(tokens[token] for token in path)
        expected = {
            token
            for token, raw in enumerate(tokens)
            if raw and token not in special and any(each.startswith(written + raw) for each in matches)
        }
        expected |= set(ends) if written in matches else set()
        assert mask_of(state, len(tokens)) == expected, (written, path)
        unread += [(*path, token) for token in expected if token not in ends]


def test_json_of_a_schema_is_walked_without_a_dead_end():
    """Random walks along the masks end with a value that the schema accepts."""
    properties = {"a": {"type": "integer"}, "b": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    constraint = compiler().compile(json_schema_grammar(schema))
    generator = random.Random(0)
    for _ in range(20):
        state, written = constraint.start((), (EOS, END)), []
        while (token := generator.choice(sorted(mask_of(state)))) not in (EOS, END):
            written.append(token)
            state.advance(token)
        value = json.loads(TOKENIZER.decode(written))
        assert isinstance(value["a"], int)
        assert set(value) <= {"a", "b"}


BYTES_BACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
KINDS = {
    "BPE with bytes": ("BPE", decoders.Sequence(BYTES_BACK)),
    "BPE with bytes, decoded without the first space": (
        "BPE",
        decoders.Sequence([*BYTES_BACK, decoders.Strip(" ", 1, 0)]),
    ),
    "BPE with bytes that are decoded as names": ("BPE", decoders.Metaspace()),
    "Unigram with bytes": ("Unigram", decoders.Sequence(BYTES_BACK)),
    "Unigram": ("Unigram", decoders.Metaspace()),
}
"""Tokenizers as SentencePiece makes them: model and decoder."""
PIECES = [*map(chr, range(33, 127)), "▁", '▁"', '":', '▁{"', "tr", "ue", "▁tr", "ï", "漢"]


def load_kind(name, file):
    model, decoder = KINDS[name]
    pieces = ["<unk>", "</s>", *PIECES, *(f"<0x{byte:02X}>" for byte in range(256) if "bytes" in name)]
    if model == "BPE":
        ids = {piece: number for number, piece in enumerate(pieces)}
        made = models.BPE(ids, [], byte_fallback=True, unk_token="<unk>")
    else:
        made = models.Unigram([(piece, -1.0) for piece in pieces], 0, "bytes" in name)
    tokenizer: Any = tokenizers.Tokenizer(made)
    tokenizer.normalizer, tokenizer.decoder = normalizers.Replace(" ", "▁"), decoder
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(file))
    return load_tokenizer(str(file))


@pytest.mark.parametrize("name", KINDS)
def test_answers_match_their_schemas_in_tokens_of_sentence_piece(name, tmp_path, monkeypatch):
    """Random walks along the masks, as the server decodes them."""
    # Harmless grammars need no process of their own.
    monkeypatch.setattr(compiler_module, "check_in_process", lambda *_: None)
    tokenizer = load_kind(name, tmp_path / "tokenizer.json")
    end, vocab_size = tokenizer.eos_id, tokenizer.vocab_size + 5
    kinds = GrammarCompiler(tokenizer, vocab_size)
    generator = random.Random(0)
    for seed in range(8):
        schema = SchemaWriter(seed).write()
        state = kinds.compile(json_schema_grammar(schema)).start((), (end,))
        writer, text = TextWriter(tokenizer, limit=2000, eos_id=end), ""
        while writer.finish_reason is None:
            allowed = sorted(mask_of(state, vocab_size))
            # A random model would not end for long.
            token = end if end in allowed else generator.choice(allowed)
            text += "".join(piece.text for piece in writer.add(token))
            state.advance(token)
        jsonschema.validate(json.loads(text), schema)


def test_a_vocabulary_without_the_text_that_a_schema_requires(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler_module, "check_in_process", lambda *_: None)
    tokenizer = load_kind("Unigram", tmp_path / "tokenizer.json")
    kinds = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    kinds.compile(json_schema_grammar({"const": "漢"}))
    with pytest.raises(UserError, match="the schema requires text that no token of the vocabulary spells"):
        kinds.compile(json_schema_grammar({"const": "字"}))


def test_the_end_is_allowed_only_where_the_grammar_accepts():
    state = compiler().compile(json_schema_grammar({"type": "integer"})).start((), (EOS, END))
    assert mask_of(state) == byte_tokens("-0123456789")
    write(state, "12")
    assert mask_of(state) == byte_tokens("0123456789") | {EOS, END}
    state.advance(END)
    # Only the end tokens of the request end it.
    state = compiler().compile(json_schema_grammar({"const": 1})).start((), (END,))
    write(state, "1")
    assert mask_of(state) == {END}


def test_special_tokens_are_no_text():
    state = compiler().compile(json_schema_grammar({"type": "string"})).start((), (EOS,))
    write(state, '"a')
    allowed = mask_of(state)
    assert allowed <= set(range(3, 259))
    assert byte_tokens('<b"\\é') & set(range(3, 131)) <= allowed


def test_thoughts_come_first():
    constraint = compiler().compile(json_schema_grammar({"const": 1}), (THINK, THINK_END))
    # The model may think, or answer at once.
    state = constraint.start(TOKENIZER.encode("hi"), (EOS, END))
    assert mask_of(state) == byte_tokens("1") | {THINK}
    state.advance(THINK)
    anything = set(range(VOCAB_SIZE)) - {EOS, END}
    assert mask_of(state) == anything
    write(state, "hm { ")
    assert mask_of(state) == anything
    state.advance(THINK_END)
    assert mask_of(state) == byte_tokens("1")
    write(state, "1")
    assert mask_of(state) == {EOS, END}
    # The prompt has opened the thought, or an earlier answer has closed one.
    assert mask_of(constraint.start([THINK], (EOS, END))) == anything
    assert mask_of(constraint.start([THINK, 5, THINK_END, 7], (EOS, END))) == byte_tokens("1") | {THINK}
    # Without thoughts the mark is a token like any other.
    assert mask_of(constraint.with_thoughts(None).start([THINK], (EOS, END))) == byte_tokens("1")


def test_texts_of_one_constraint_are_independent():
    constraint = compiler().compile(json_schema_grammar({"enum": ["ab", "cd"]}))
    first, second = (constraint.start((), (EOS,)) for _ in range(2))
    write(first, '"a')
    assert mask_of(second) == byte_tokens('"')
    masks_BW = all_tokens(3, VOCAB_SIZE)
    assert fill_masks({0: first, 2: second}, masks_BW) == {}
    assert not np.array_equal(masks_BW[0], masks_BW[2])
    assert np.all(masks_BW[1] == 0xFFFFFFFF)


def test_a_vocabulary_that_cannot_spell_the_answer():
    vocabulary = grammar_process.load_vocabulary(grammar_process.Vocabulary([b"a", b""], 1))
    matcher = grammar_process.compile_grammar(vocabulary, json_schema_grammar({"const": 1}).source)
    mask_BW = all_tokens(1, 2)
    errors = fill_masks({0: Constraint(matcher, 2, 1).start((), (1,))}, mask_BW)
    assert isinstance(errors[0], UserError)
    assert np.all(mask_BW == 0xFFFFFFFF)

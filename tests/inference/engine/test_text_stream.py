"""Characters of tokens, stop strings and log-probabilities, by hand and against a forward pass."""

import dataclasses
import functools
import itertools
import random

import numpy as np
import pytest
from small_models import SLIDING, SMALL
from test_generate import NUM_NEW, PROMPTS, greedy_texts, load, whole_forward

from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.data.tokenizers.training import train_tokenizer
from zaya_jax.inference.completion import complete, stream_text
from zaya_jax.inference.engine.generate import generate
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.engine.text_stream import Detokenizer, Piece, StopFilter, TextWriter

BYTES = load_tokenizer("byte-chat")
THINK, THINK_END, END = 261, 262, 260
GREEDY = SamplingParams(max_new_tokens=NUM_NEW)


def written(tokens, **options):
    """The pieces of some tokens, and how the text ended."""
    writer = TextWriter(BYTES, **({"limit": 100, "eos_id": END} | options))
    return [writer.add(token) for token in tokens], writer


def text_of(pieces):
    return "".join(piece.text for each in pieces for piece in each)


def test_a_character_appears_with_its_last_byte():
    pieces, _ = written(BYTES.encode("aé€"))
    assert [[piece.text for piece in each] for each in pieces] == [["a"], [], ["é"], [], [], ["€"]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A byte-level BPE whose tokens cut some characters."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "texts").mkdir()
    for i in range(3):
        (folder / f"texts/{i}.txt").write_text("the cat sat on the mat. yes? é 猫 " * 9 + str(i))
    made = train_tokenizer(folder / "made", source=str(folder / "texts"), vocab_size=300)
    return load_tokenizer(str(made.file))


@pytest.mark.parametrize("kind", ["byte-chat", "trained"])
def test_pieces_join_to_the_decoded_text(kind, trained):
    """Also of tokens that are not text: bytes in any order, with special tokens among them."""
    tokenizer = trained if kind == "trained" else BYTES
    numbers = random.Random(0)
    texts = [tokenizer.encode("the cät. 猫猫 😀\nyes  no")]
    texts += [[numbers.randrange(tokenizer.vocab_size) for _ in range(60)] for _ in range(40)]
    for tokens in texts:
        detokenizer = Detokenizer(tokenizer)
        actual = "".join(map(detokenizer.add, tokens)) + detokenizer.flush()
        assert actual == tokenizer.decode(tokens)


def test_endless_invalid_bytes_appear_too():
    """A piece appears as soon as no character can need it; keeping all bytes would take n^2 time."""
    tokens = [byte + 3 for byte in b"\xe2\x82" * 40 + b"\xe2\x82\xac" + b"\xf0\x9f\x98" * 30 + b"\xe2" * 30]
    detokenizer, actual = Detokenizer(BYTES), ""
    for number, token in enumerate(tokens, 1):
        actual += detokenizer.add(token)
        assert len(actual) >= len(BYTES.decode(tokens[:number])) - 9
    assert actual + detokenizer.flush() == BYTES.decode(tokens)


@pytest.mark.parametrize(
    ("stop", "text", "given"),
    [
        (["\n\n"], "a\nb\n\nc", "a\nb"),
        (["aab"], "aaab", "a"),  # the beginning of one is part of the beginning of another
        (["abab"], "abaabab", "aba"),
        (["abcd", "c"], "abcd", "ab"),  # the one that is complete first
        (["cd", "abcd"], "xabcd", "x"),  # of two that are complete at once, the longer
        (["zz"], "az", "az"),
        ([], "ab", "ab"),
    ],
)
def test_stop_strings_in_parts_of_any_size(stop, text, given):
    for num_cuts in range(len(text)):
        for cuts in itertools.combinations(range(1, len(text)), num_cuts):
            stops, actual = StopFilter(stop), ""
            for first, last in itertools.pairwise((0, *cuts, len(text))):
                actual += "" if stops.is_stopped else stops.add(text[first:last])
                assert given.startswith(actual)  # no output is part of a stop string
            assert actual + stops.flush() == given
            assert stops.is_stopped == (given != text)


def test_a_possible_stop_string_is_held_back():
    pieces, writer = written(BYTES.encode("a--b--"), stop=["--!"])
    assert [text_of([each]) for each in pieces] == ["a", "", "", "--b", "", ""]
    assert writer.add(END) == [Piece("--")]
    assert writer.finish_reason == "stop"


def test_finish_reasons():
    pieces, writer = written([*BYTES.encode("ab"), END])
    assert (text_of(pieces), writer.finish_reason, writer.num_tokens) == ("ab", "stop", 3)
    pieces, writer = written(BYTES.encode("ab\u20ac")[:4], limit=4, stop=["bc"])
    assert (text_of(pieces), writer.finish_reason) == ("ab\ufffd", "length")
    pieces, writer = written(BYTES.encode("abc"), limit=3, stop=["bc"])
    assert (text_of(pieces), writer.finish_reason, writer.num_tokens) == ("a", "stop", 3)


def test_marks_are_separate_pieces():
    tokens = [THINK, *BYTES.encode("hm-"), THINK_END, *BYTES.encode("-o")]
    pieces, _ = written(tokens, marks={THINK: "<think>", THINK_END: "</think>"}, stop=["--"])
    output = [piece for each in pieces for piece in each]
    assert [piece.text for piece in output if piece.is_mark] == ["<think>", "</think>"]
    assert text_of(pieces) == "<think>hm-</think>-o"
    assert text_of(written(tokens)[0]) == "hm--o"


def taken_logprobs(config, prompt, tokens):
    """Returns log-probabilities of the new tokens, from one pass over the whole text without a cache."""
    model, variables = load(config)
    tokens_BT = np.zeros((1, 64), np.int32)
    text = [*prompt, *tokens]
    tokens_BT[0, : len(text)] = text
    logits_TV = np.asarray(whole_forward(model, variables, tokens_BT))[0].astype(np.float64)
    logprobs_TV = logits_TV - np.log(np.exp(logits_TV).sum(axis=-1, keepdims=True))
    places = np.arange(len(prompt), len(text)) - 1
    return logprobs_TV[places, tokens]


@pytest.mark.parametrize(
    "sampled", [{}, {"temperature": 1.7, "top_k": 9, "top_p": 0.9, "seed": 3}], ids=["greedy", "sampled"]
)
def test_logprobs_match_a_forward_pass(sampled):
    """Log-probabilities are those of the network's distribution, whatever the sampling filters; up to
    rounding.
    """
    params = dataclasses.replace(GREEDY, **sampled)
    actual = complete(*load(SLIDING), BYTES, PROMPTS, params)
    for prompt, each in zip(PROMPTS, actual, strict=True):
        assert len(each.logprobs) == len(each.tokens) == NUM_NEW
        expected = taken_logprobs(SLIDING, prompt, list(each.tokens))
        np.testing.assert_allclose(each.logprobs, expected, rtol=1e-4, atol=1e-4)
        assert np.ptp(expected) > 0.1


def test_completions_match_generate():
    actual = complete(*load(SMALL), BYTES, PROMPTS, GREEDY)
    assert [each.tokens for each in actual] == list(greedy_texts(SMALL))
    assert [each.text for each in actual] == [BYTES.decode(text) for text in greedy_texts(SMALL)]
    assert {each.finish_reason for each in actual} == {"length"}


def test_prompts_have_their_own_end_tokens_and_limits():
    texts = greedy_texts(SMALL)
    eos = texts[0][6]
    end = texts[0].index(eos) + 1
    params = [SamplingParams(max_new_tokens=limit, stop_token_ids=(eos,)) for limit in (NUM_NEW, 3, 5)]
    first, second, third = complete(*load(SMALL), BYTES, PROMPTS, params)
    assert (first.tokens, first.finish_reason) == (texts[0][:end], "stop")
    assert len(first.logprobs) == end
    assert (second.tokens, third.tokens) == (texts[1][:3], texts[2][:5])
    assert second.finish_reason == ("stop" if eos in texts[1][:3] else "length")


def test_a_stop_string_over_several_tokens_ends_only_its_row():
    whole = complete(*load(SMALL), BYTES, PROMPTS, GREEDY)
    stop = whole[0].text[7:10]  # one byte per token here
    first = whole[0].text.index(stop)
    actual = complete(*load(SMALL), BYTES, PROMPTS, dataclasses.replace(GREEDY, stop=(stop,)))
    assert (actual[0].text, actual[0].finish_reason) == (whole[0].text[:first], "stop")
    assert actual[0].tokens == whole[0].tokens[: len(actual[0].tokens)]
    assert BYTES.decode(actual[0].tokens).endswith(stop)
    for each, before in zip(actual[1:], whole[1:], strict=True):
        assert each == before or stop in before.text
    streamed = stream_text(*load(SMALL), BYTES, PROMPTS[0], dataclasses.replace(GREEDY, stop=(stop,)))
    assert "".join(piece.text for piece in streamed) == actual[0].text


def test_a_row_with_its_own_seed_equals_a_single_text():
    sampled = functools.partial(SamplingParams, max_new_tokens=NUM_NEW, temperature=1.0)
    seeds = (4, 2**32 - 1, 4)
    params = [sampled(seed=seed) for seed in seeds]
    together = complete(*load(SMALL), BYTES, [PROMPTS[0], PROMPTS[1], PROMPTS[0]], params)
    assert together[0] == together[2]
    for prompt, seed, actual in zip(PROMPTS, seeds[:2], together, strict=False):
        alone = generate(*load(SMALL), prompt, max_new_tokens=NUM_NEW, temperature=1.0, seed=seed)
        assert list(actual.tokens) == alone


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match='a stop string is ""; it must have at least one character'):
        SamplingParams(max_new_tokens=NUM_NEW, stop=("a", ""))

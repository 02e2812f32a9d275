"""Texts of prompt lines: continuous batching, compared with a static batch of each line."""

import dataclasses

import jax
import numpy as np
import pytest
from constrained_texts import CONFIG, END, EOS, TOKENIZER, constraint_of, load
from small_models import EXECUTION

from zaya_jax.errors import UserError
from zaya_jax.inference import line_texts
from zaya_jax.inference.completion import complete
from zaya_jax.inference.engine.engine import PREFILL_CHUNK, Engine
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.line_texts import batches, continue_lines, groups, params_of, slot_length
from zaya_jax.inference.prompt_files import PromptLine
from zaya_jax.inference.prompting import Prompt
from zaya_jax.model.zaya import Zaya

PARAMS = SamplingParams(max_new_tokens=1, temperature=1.2)


def line(number, length, limit=4, end_ids=(EOS,), first=0):
    random = np.random.default_rng((number, 1))
    tokens = [*(20 + n % 180 for n in range(first)), *random.integers(20, 200, length - first).tolist()]
    return PromptLine(number, {}, Prompt(tokens, end_ids), limit, seed=number)


def texts_of(lines, params=PARAMS, **options):
    """Lists of lines and texts, as they become complete."""
    options = {"batch_size": 3} | options
    return list(continue_lines(*load(), TOKENIZER, lines, params, **options))


def by_number(texts):
    found = [(line.number, completion) for each in texts for line, completion in each]
    assert len(dict(found)) == len(found), "each text is yielded once"
    return dict(found)


def assert_are_alone(lines, texts, params=PARAMS):
    assert texts.keys() == {each.number for each in lines}
    for each in lines:
        (expected,) = complete(*load(), TOKENIZER, [each.prompt.tokens], [params_of(each, params)])
        actual = texts[each.number]
        assert dataclasses.replace(actual, logprobs=()) == dataclasses.replace(expected, logprobs=())
        np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


def test_texts_are_those_of_static_batches():
    """Mixed lengths, limits and end tokens, more lines than slots, and stop strings."""
    lines = [line(number, 17 + 3 * number % 14, 3 + 7 * number % 12) for number in range(1, 9)]
    lines.append(line(9, 30, 30, end_ids=(EOS, END)))
    texts = by_number(texts_of(lines))
    assert_are_alone(lines, texts)
    stop = next(text[2:4] for each in texts.values() if len(text := each.text) > 5)
    params = dataclasses.replace(PARAMS, stop=(stop,))
    stopped = by_number(texts_of(lines, params))
    assert_are_alone(lines, stopped, params)
    assert any(len(stopped[number].tokens) < len(text.tokens) for number, text in texts.items())
    # Where devices share a cache, the lines are continued in static batches.
    model, variables = load()
    static = line_texts.continue_in_batches(
        model, variables, TOKENIZER, lines, PARAMS, size=2, context_devices=1, done=()
    )
    assert {number: each.tokens for number, each in by_number(static).items()} == {
        number: each.tokens for number, each in texts.items()
    }


def test_no_line_waits_for_a_long_text():
    lines = [line(1, 20, 120, end_ids=()), *(line(number, 20, 4, end_ids=()) for number in range(2, 9))]
    order = [each.number for texts in texts_of(lines, batch_size=2) for each, _ in texts]
    assert order == [2, 3, 4, 5, 6, 7, 8, 1]


def test_groups_are_computed_again_as_a_whole(monkeypatch):
    """Those whose lines all have texts are skipped; a group's engine has nothing of another group's."""
    monkeypatch.setattr(line_texts, "LINES_PER_SLOT", 2)
    lines = [line(number, 18, 5) for number in range(1, 10)]
    texts = by_number(texts_of(lines, batch_size=2))
    again = by_number(texts_of(lines, batch_size=2, done={1, 2, 3, 4, 6}))
    assert again == {number: texts[number] for number in (5, 6, 7, 8, 9)}  # bit for bit


@pytest.mark.campaign
def test_common_beginnings_are_read_once(monkeypatch):
    engines = []

    class KeptEngine(Engine):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            engines.append(self)

    monkeypatch.setattr(line_texts, "Engine", KeptEngine)
    lines = [line(number, PREFILL_CHUNK + 9, 3, first=PREFILL_CHUNK) for number in (1, 2)]
    other = line(3, PREFILL_CHUNK + 9, 3)
    assert_are_alone([*lines, other], by_number(texts_of([*lines, other])))
    by_number(texts_of([lines[0], other]))
    assert [each.stats().tokens_from_prefixes for each in engines] == [PREFILL_CHUNK, 0]
    assert [each.prefixes.is_enabled for each in engines] == [True, False]


def test_a_grammar_that_fails_ends_the_generation(monkeypatch):
    constraint = constraint_of({"const": 123456})
    start = constraint.start

    def start_broken(*arguments):
        state = start(*arguments)
        state.matcher.consume_token(EOS)  # not a number: an error that the matcher never leaves
        return state

    monkeypatch.setattr(constraint, "start", start_broken)
    monkeypatch.setattr(type(constraint), "with_thoughts", lambda self, _: self)
    with pytest.raises(UserError, match="too complex"):
        texts_of([line(1, 20)], dataclasses.replace(PARAMS, constraint=constraint))


def test_logits_that_are_not_finite_end_the_generation():
    model, variables = load()
    broken = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), variables)
    with pytest.raises(
        UserError, match=r"prompt 7: after 20 tokens .* not finite numbers; check the weights"
    ):
        list(continue_lines(model, broken, TOKENIZER, [line(7, 20)], PARAMS, batch_size=3))


def test_groups_have_one_length():
    lines = [line(1, 3), line(2, 40, 300), line(3, 17, 5), line(4, 290), line(5, 9, 6), line(6, 600, 8)]
    actual = [(length, [each.number for each in group]) for length, group in groups(lines, 2)]
    assert actual == [(768, [6]), (512, [2, 4]), (256, [5, 3, 1])]
    sizes = [len(group) for _, group in groups([line(number, 9) for number in range(1, 40)], 2)]
    assert sizes == [2 * line_texts.LINES_PER_SLOT] * 2 + [39 - 4 * line_texts.LINES_PER_SLOT]
    for number in range(1, 9000):
        assert number <= slot_length(number) < number + max(line_texts.MIN_LENGTH, number / 4)


def test_a_slot_has_no_more_room_than_the_model():
    _, variables = load()
    model = Zaya(dataclasses.replace(CONFIG, max_position_embeddings=160), EXECUTION)
    lines = [line(1, 150, 10)]
    ((_, text),) = next(continue_lines(model, variables, TOKENIZER, lines, PARAMS, batch_size=1))
    assert len(text.tokens) == 10 or text.finish_reason == "stop"


def test_batches_have_one_shape():
    """Those of devices that share a cache."""
    lines = [
        line(1, 3),
        line(2, 40),
        line(3, 17),
        line(4, 30),
        line(5, 9, end_ids=(2,)),
        line(6, 16),
        line(7, 2, 60),
    ]
    actual = [[each.number for each in batch] for batch in batches(lines, 2)]
    assert sorted(number for batch in actual for number in batch) == [1, 2, 3, 4, 5, 6, 7]
    assert actual[:2] == [[2], [7]]  # 64 + 4 tokens, and 16 + 60, need a longer cache than the others
    assert [6, 1] in actual
    assert [4, 3] in actual
    assert [5] in actual

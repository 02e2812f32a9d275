"""Markovian RSA: compared with plain loops for one seed; special cases, answers, and the command."""

import dataclasses
import json
import re
import string

import jax
import pytest
from rsa_reference import markovian_rsa
from small_runs import make_chat_run

from zaya_jax import cli
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer, load_tokenizer
from zaya_jax.errors import UserError
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.loading import load_for_generation
from zaya_jax.inference.prompting import Prompt
from zaya_jax.inference.rsa import command
from zaya_jax.inference.rsa.aggregation import aggregate, answer_by_pattern, find_answer, tail_of, vote
from zaya_jax.inference.rsa.markovian_rsa import RsaConfig, Thinker

BYTES = load_tokenizer("byte-chat")


class Letters(ByteTokenizer):
    """A tokenizer of letters and signs that maps all bytes to them, so that an untrained network writes
    text.
    """

    characters = string.printable[:94]

    def encode(self, text, *, specials=False):
        return [3 + self.characters.index(character) for character in text]

    def decode(self, ids):
        return "".join(self.characters[(i - 3) % 94] for i in ids if i >= 3)


LETTERS, END = Letters(), 123  # a token that this network generates now and then
QUESTION, SEED, TEMPERATURE = "3+4+1=", 7, 0.8
SCHEME = RsaConfig(population=5, candidates=3, rounds=2, thinking=14, tail=6, answer_tokens=9)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinking") / "run"
    make_chat_run(folder)
    return folder


@pytest.fixture(scope="module")
def thinker(run_folder):
    run = load_for_generation(str(run_folder))
    return Thinker(
        model=run.model,
        variables=run.variables,
        tokenizer=LETTERS,
        prompt_of=lambda text: Prompt(LETTERS.encode(text), (END,)),
        params=SamplingParams(max_new_tokens=1, temperature=TEMPERATURE, seed=SEED),
        aggregate=lambda question, tails: "|".join([question, *tails]),
        batch_size=5,
    )


@pytest.fixture(scope="module")
def forward(thinker):
    """Logits of a text, without a cache."""
    return jax.jit(lambda tokens_BT: thinker.model.apply(thinker.variables, tokens_BT).logits_BTV)


@pytest.mark.parametrize(
    ("changes", "batch_size"),
    [
        ({}, 5),
        ({}, 2),
        ({"candidates": 1}, 5),
        ({"candidates": 5, "rounds": 1, "tail": 4}, 5),
        ({"rounds": 1, "thinking": 7, "tail": 7}, 5),
    ],
    ids=["general", "other batches", "own tails alone", "all tails", "whole chains"],
)
def test_results_match_the_reference_loops(changes, batch_size, thinker, forward):
    """Subsets, tokens, tails and prompts, of every candidate of every round."""
    scheme = dataclasses.replace(SCHEME, **changes)
    actual = dataclasses.replace(thinker, batch_size=batch_size).think(QUESTION, scheme)
    expected = markovian_rsa(
        forward,
        LETTERS,
        QUESTION,
        N=scheme.population,
        C=scheme.candidates,
        T=scheme.rounds,
        beta=scheme.thinking,
        tau=scheme.tail,
        answer_budget=scheme.answer_tokens,
        end_id=END,
        seed=SEED,
        temperature=TEMPERATURE,
    )
    assert [len(population) for population in actual.rounds] == [5] * (scheme.rounds + 1)
    for population, traces in zip(actual.rounds, expected, strict=True):
        for candidate, trace in zip(population, traces, strict=True):
            assert list(candidate.subset) == trace.subset
            assert list(candidate.tokens) == trace.tokens
            assert candidate.num_prompt_tokens == len(LETTERS.encode(trace.prompt))
            text = LETTERS.decode([token for token in trace.tokens if token != END])
            assert (candidate.text, candidate.tail) == (text, text[-scheme.tail :])
            assert candidate.finish_reason == ("stop" if trace.tokens[-1] == END else "length")
    assert actual.num_new_tokens == sum(len(trace.tokens) for traces in expected for trace in traces)
    traces = [trace for traces in expected for trace in traces]
    assert len({trace.prompt for trace in traces}) >= 5
    assert {trace.tokens[-1] == END for trace in traces} == {True, False}


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_both_readings_of_rounds_agree_where_they_coincide(rounds, thinker):
    """T rounds after an additional first round are T + 1 rounds of which the first is counted."""
    scheme = dataclasses.replace(SCHEME, rounds=rounds - 1, thinking=4, tail=2, answer_tokens=3)
    counted = dataclasses.replace(scheme, rounds=rounds, first_round="counted")
    actual, same = (thinker.think(QUESTION, each) for each in (scheme, counted))
    assert len(same.rounds) == rounds  # T itself
    assert dataclasses.replace(same, config=scheme) == actual
    assert thinker.max_context(QUESTION, scheme) == thinker.max_context(QUESTION, counted)


@pytest.mark.parametrize(
    ("first_round", "rounds", "num_candidates"),
    [
        ("extra", 0, 16),
        ("extra", 2, 48),
        ("extra", 4, 80),
        ("counted", 1, 16),
        ("counted", 2, 32),
        ("counted", 4, 64),
    ],
)
def test_candidates_of_a_question(first_round, rounds, num_candidates):
    scheme = RsaConfig(rounds=rounds, first_round=first_round)
    assert scheme.population * (scheme.num_aggregations + 1) == num_candidates


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"rounds": 0, "first_round": "counted"},
            "rounds is 0; with first_round 'counted' it must be 1 (no aggregation) or above",
        ),
        ({"first_round": "all"}, "first_round is 'all'; it must be extra or counted"),
    ],
)
def test_invalid_rounds(values, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        RsaConfig(**values)


def test_subsets_are_without_replacement_and_cover_the_population(thinker):
    scheme = dataclasses.replace(SCHEME, population=16, candidates=4, rounds=1, thinking=1, tail=1)
    actual = thinker.think(QUESTION, scheme)
    subsets = [candidate.subset for candidate in actual.rounds[1]]
    assert all(len(set(subset)) == 4 for subset in subsets)
    assert {each for subset in subsets for each in subset} == set(range(16))
    assert len({frozenset(subset) for subset in subsets}) > 12
    assert len({candidate.seed for population in actual.rounds for candidate in population}) == 32


def test_seeds_change_the_candidates_and_zero_rounds_only_sample(thinker):
    scheme = dataclasses.replace(SCHEME, rounds=0, answer_tokens=None)
    first = thinker.think(QUESTION, scheme)
    other = dataclasses.replace(thinker, params=dataclasses.replace(thinker.params, seed=SEED + 1))
    assert len(first.rounds) == 1
    assert len({candidate.text for candidate in first.rounds[0]}) == 5
    texts = {candidate.text for candidate in other.think(QUESTION, scheme).rounds[0]}
    assert not texts & {candidate.text for candidate in first.rounds[0]}


def test_questions_do_not_depend_on_each_other(thinker):
    """Batches contain candidates of both questions, and the second prompt is longer."""
    second = "3+4+1+2+2="
    actual = thinker.think_all([QUESTION, second], SCHEME)
    params = dataclasses.replace(thinker.params, seed=SEED + 1)
    assert actual[0] == thinker.think(QUESTION, SCHEME)
    assert actual[1] == dataclasses.replace(thinker, params=params).think(second, SCHEME)


def test_answers_are_between_the_thought_and_the_stop_string(thinker):
    """An answer follows the thought and precedes the stop string, which is not in the tail."""
    scheme = dataclasses.replace(SCHEME, rounds=0, answer_tokens=None)
    whole = thinker.think(QUESTION, scheme).rounds[0][0]
    stop, think_end = whole.text[8:10], whole.tokens[3]
    assert whole.text.index(stop) == 8
    params = dataclasses.replace(thinker.params, stop=(stop,))
    output = dataclasses.replace(thinker, params=params, think_end_id=think_end, answer_of=lambda text: text)
    actual = output.think(QUESTION, scheme).rounds[0][0]
    assert actual.text == whole.text[:8]
    assert actual.answer == whole.text[4:8]
    assert actual.tail == whole.text[2:8]
    assert actual.finish_reason == "stop"


def test_a_budget_beyond_the_context_fails_first(thinker):
    scheme = dataclasses.replace(SCHEME, thinking=400, tail=100)
    sentence = r"3 tails of 100 tokens and the continuation may have \d+ tokens; they must not .*, 512"
    with pytest.raises(ValueError, match=sentence):
        thinker.think(QUESTION, scheme)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"population": 0}, "population is 0; it must be at least 1"),
        ({"rounds": -1}, "rounds is -1; with first_round 'extra' it must be 0"),
        ({"candidates": 6}, "candidates is 6; it must be at most population, 5"),
        ({"tail": 15}, "tail is 15; it must be at most thinking, 14"),
        ({"answer_tokens": 0}, "answer_tokens is 0; it must be at least 1"),
    ],
)
def test_invalid_configs(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(SCHEME, **changes)


def test_tails_are_whole_characters_within_the_token_limit():
    text = "2 + 2 = 4, die Lösung"
    assert tail_of(BYTES.encode(text), 6, BYTES) == "ösung"  # the first of seven bytes is cut off
    assert tail_of(BYTES.encode(text), 500, BYTES) == text
    assert tail_of([], 5, BYTES) == ""
    torn = [
        3 + 0xE2,
        *BYTES.encode("ab"),
        3 + 0xE2,
        *BYTES.encode("cd"),
    ]  # one byte becomes U+FFFD, which has three bytes
    assert len(BYTES.encode(tail_of(torn, 4, BYTES))) <= 4


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{3}, no: \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        ("one\n two \n\n", "two"),
        (r"cut \boxed{12", r"cut \boxed{12"),
        (" \n", None),
        ("", None),
    ],
)
def test_answers_are_found(text, answer):
    assert find_answer(text) == answer


def test_answers_by_a_pattern():
    assert answer_by_pattern(r"=(\d)")("1=2 3=4") == "4"
    assert answer_by_pattern(r"\d$")("1\n2") == "2"
    assert answer_by_pattern(r"=(\d)")("none") is None
    with pytest.raises(ValueError, match="not a regular expression"):
        answer_by_pattern("(")


def test_majority_vote_and_ties():
    assert vote(["a", None, "b", "b"]) == (2, {"b": 2, "a": 1})
    assert vote(["a", "b", "b", "a"]) == (0, {"a": 2, "b": 2})
    assert vote([None, None]) == (0, {})


def test_prompts_number_the_attempts_and_are_filled_once():
    text = aggregate("What is {candidates}?", ["one {question}", "two"])
    assert text.startswith("What is {candidates}?\n")
    assert "Attempt 1:\none {question}\n\nAttempt 2:\ntwo\n" in text
    assert "Go on from it" in aggregate("q", ["one"])


def test_the_command_prints_the_answer_and_writes_json(run_folder, tmp_path, capsys):
    own = tmp_path / "prompt.txt"
    own.write_text("{question} {candidates} so")
    record = tmp_path / "thought.json"
    scheme = ["--population=5", "--candidates=2", "--rounds=1", "--thinking=12", "--tail=4"]
    words = ["--chat", "--seed=3", f"--json={record}", f"--aggregation={own}", "--batch-size=5"]
    cli.main(["think", str(run_folder), "--prompt", "hi", *scheme, *words])
    out, err = capsys.readouterr()
    actual = json.loads(record.read_text())
    assert out == actual["text"] + "\n"
    assert err.startswith("2 rounds of 5 candidates, each of at most 12 tokens; each sees 2 tails of 4\n")
    assert f"{actual['num_new_tokens']} tokens were generated in 2 rounds" in err
    assert actual["scheme"] == {
        "population": 5, "candidates": 2, "rounds": 1, "first_round": "extra", "thinking": 12, "tail": 4,
        "answer_tokens": None,
    }  # fmt: skip
    first, last = actual["rounds"]
    assert actual["text"] == last[actual["chosen"]]["text"]
    for candidate in last:
        shown = [first[number]["tail"] for number in candidate["subset"]]
        attempts = "\n\n".join(f"Attempt {number}:\n{tail}" for number, tail in enumerate(shown, 1))
        run = load_for_generation(str(run_folder))
        assert candidate["num_prompt_tokens"] == len(run.chat_format(None).prompt(f"hi {attempts} so"))


def test_default_thinking_fills_the_context(run_folder, monkeypatch):
    def think(thinker, question, scheme):
        raise ValueError(f"{scheme.thinking} {scheme.tail} {thinker.max_context(question, scheme)}")

    monkeypatch.setattr(command, "_think", think)
    with pytest.raises(ValueError, match="89 44 509"):
        command.main(["--prompt", "hi", str(run_folder)])

"""Corpora of preferences: how records are packed, what a run reads, and the error message of each mistake."""

import json
import random

import numpy as np
import pytest
from small_runs import reading_from_the_start

from zaya_jax.data.chats.preference_corpus import build_preference_corpus
from zaya_jax.data.chats.preference_records import read_preferences
from zaya_jax.data.chats.records import Message
from zaya_jax.data.chats.templates.encoding import load_chat_format
from zaya_jax.data.corpora.command import main
from zaya_jax.data.corpora.shards import open_corpus
from zaya_jax.data.reading.loader import evaluation_batches, training_batches
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer

LENGTH = 160
TOKENIZER = load_tokenizer("byte-chat")
FORMAT = load_chat_format(None, TOKENIZER)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def record(chosen, rejected, **values):
    return json.dumps({"chosen": chosen, "rejected": rejected} | values)


def records(num=20):
    numbers = random.Random(0)
    return [
        record("é" * numbers.randrange(1, 9), "no " * numbers.randrange(1, 9), prompt=f"q{i}")
        for i in range(num)
    ]


def write(path, lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def build(folder, source, **options):
    return build_preference_corpus(
        folder, source=source, tokenizer=TOKENIZER, **{"sequence_length": LENGTH, **options}
    )


# Records

PROMPT, GOOD, BAD = [user("a"), assistant("b"), user("c")], [assistant("good")], [assistant("bad")]


@pytest.mark.parametrize(
    ("line", "num_shared"),
    [
        (record([*PROMPT, *GOOD], [*PROMPT, *BAD]), 3),
        (record(GOOD, BAD, prompt=PROMPT), 3),
        (record("good", "bad", prompt=PROMPT), 3),
        (record([*PROMPT, *GOOD], [*PROMPT, *BAD], prompt=PROMPT), 3),
        (record("good", BAD, prompt="c", score_chosen=3.5), 1),
        # As in ultrafeedback_binarized, whose prompt is also in both conversations.
        (record([user("c"), *GOOD], [user("c"), *BAD], prompt="c"), 1),
    ],
)
def test_all_forms_of_a_pair_are_read(line, num_shared, tmp_path):
    (pair,) = read_preferences(write(tmp_path / "pairs.jsonl", [line]))
    prompt = tuple(Message(**each) for each in PROMPT[-num_shared:])
    assert pair.prompt == prompt
    assert pair.chosen == (*prompt, Message("assistant", "good"))
    assert pair.rejected == (*prompt, Message("assistant", "bad"))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", r"is not JSON"),
        (
            record("a", "b"),
            'has a chosen that is text, but no prompt; add the "prompt" that it answers',
        ),
        (json.dumps({"chosen": PROMPT}), 'has no rejected; a non-empty list of messages, "rejected"'),
        (record([], GOOD, prompt="q"), 'has no chosen; a non-empty list of messages, "chosen"'),
        (record(GOOD, BAD, prompt=None), 'has answers but no prompt; add the "prompt"'),
        (record(GOOD, [3], prompt="q"), ", rejected, message 1, has a int; a message has role and content"),
        (record("a\ud800", "b", prompt="q"), ", chosen, message 1, has half a surrogate pair at character 1"),
        (
            record(GOOD, [user("r"), *BAD], prompt="q"),
            "has a rejected that starts with a message of the user;",
        ),
        (
            record([user("q"), *GOOD], [user("r"), *BAD]),
            "has conversations that start with different messages; chosen",
        ),
        (
            record([user("q")], [user("q"), *BAD]),
            " has a chosen that is the start of rejected, so",
        ),
        (record([*PROMPT, *GOOD], [*PROMPT, user("d")]), ": nothing in rejected is learned"),
    ],
)
def test_an_invalid_record_is_reported_with_its_location(line, sentence, tmp_path):
    source = write(tmp_path / "pairs.jsonl", [records(1)[0], line])
    with pytest.raises(ValueError, match=sentence) as raised:
        build(tmp_path / "corpus", source)
    assert str(raised.value).startswith(f"{source}:2")
    assert not (tmp_path / "corpus").exists()


# Corpora


def sides_of(batches):
    """Yields each pair in the batches: tokens and mask of both conversations."""
    for batch in batches:
        for row in range(len(batch.tokens_BT)):
            segments_T, sides = batch.segments_BT[row], []
            for segment in range(1, segments_T.max() + 1):
                inside = segments_T == segment
                learned_T = np.concatenate([[0], batch.weights_BT[row][inside][:-1]])
                sides.append((batch.tokens_BT[row][inside].tolist(), learned_T.tolist()))
            yield from zip(sides[::2], sides[1::2], strict=True)


def test_every_pair_is_read_whole_and_once(tmp_path):
    """Both are in one window, the chosen one first; the prompt's own answers are learned in neither."""
    turns = record([*PROMPT, *GOOD], [*PROMPT, *BAD])
    source = write(tmp_path / "pairs.jsonl", [*records(), turns])
    corpus = build(tmp_path / "corpus", source, validation_percent=20).corpus
    assert corpus.preferences
    assert corpus.train.num_blocks < corpus.train.documents
    assert corpus.validation.documents > 1
    actual = []
    for split in ("train", "validation"):
        actual += sides_of(evaluation_batches(corpus, split=split, sequence_length=LENGTH, batch_size=1))
    expected = []
    for pair in read_preferences(source):
        sides = []
        for messages in (pair.chosen, pair.rejected):
            encoded = FORMAT.encode(messages)
            learned_T = encoded.learned_T.astype(float)
            learned_T[: len(FORMAT.encode(messages[:-1]))] = 0
            sides.append((encoded.tokens_T.tolist(), learned_T.tolist()))
        expected.append(tuple(sides))
    assert sorted(actual) == sorted(expected)
    # What is learned is the answer and its end: its bytes and one delimiter.
    *_, ((_, of_chosen), (_, of_rejected)) = expected
    assert (sum(of_chosen), sum(of_rejected)) == (len("good") + 1, len("bad") + 1)


def test_pairs_of_one_prompt_are_in_one_split(tmp_path):
    lines = [record(f"a{j}", f"b{j}", prompt=f"q{i}") for i in range(12) for j in range(3)]
    corpus = build(tmp_path / "corpus", write(tmp_path / "p.jsonl", lines), validation_percent=30).corpus
    assert 0 < corpus.validation.documents < 36
    assert corpus.validation.documents % 3 == 0
    one = write(tmp_path / "one.jsonl", lines[:3])
    with pytest.raises(ValueError, match="has 1 different prompts that fit a window; at least two"):
        build(tmp_path / "none", one)


def test_the_command_prints_skipped_pairs(tmp_path, capsys):
    lines = [*records(), record("same", "same", prompt="q"), record("a" * 99, "b" * 99, prompt="q")]
    source = write(tmp_path / "pairs.jsonl", lines)
    main(["preferences", f"{tmp_path}/corpus", "--source", str(source), "--sequence-length", str(LENGTH)])
    printed = capsys.readouterr().out
    assert f"skipped, both sides the same: {source}:21\n" in printed
    assert f"skipped, longer than a window: {source}:22\n" in printed
    assert "pairs cut" in printed
    left_out = open_corpus(tmp_path / "corpus").left_out
    assert left_out == {"both sides the same": 1, "longer than a window": 1}


# Reading


def test_reference_values_come_with_their_pairs(tmp_path):
    """Reference values follow their window in any order; after the end of a split there are none."""
    corpus = build(tmp_path / "corpus", write(tmp_path / "pairs.jsonl", records())).corpus
    in_order = [*evaluation_batches(corpus, split="train", sequence_length=LENGTH, batch_size=1)]
    counts = [int(batch.segments_BT.max()) for batch in in_order]
    reference = [np.arange(count) + 100.0 * i + 1 for i, count in enumerate(counts)]
    numbers = {batch.tokens_BT.tobytes(): i for i, batch in enumerate(in_order)}

    def check(batch):
        for row in range(len(batch.tokens_BT)):
            number = numbers.get(batch.tokens_BT[row].tobytes())
            begins_T = (batch.positions_BT[row] == 0) & (batch.segments_BT[row] > 0)
            expected = [] if number is None else reference[number]
            np.testing.assert_array_equal(batch.reference_BT[row][begins_T], expected)
            assert not batch.reference_BT[row][~begins_T].any()
            yield number

    reading = reading_from_the_start({"c": corpus}, length=LENGTH)
    options = {"batch_size": 1, "num_steps": len(counts)}
    batches = training_batches(reading, {"c": corpus}, references={"c": reference}, **options)
    read = [number for batch in batches for number in check(batch)]
    assert sorted(read) == list(range(len(counts)))
    assert read != sorted(read)
    batches = evaluation_batches(
        corpus, split="train", sequence_length=LENGTH, batch_size=4, first=1, limit=6, reference=reference
    )
    assert [number for batch in batches for number in check(batch)] == [1, 2, 3, 4, 5, 6, None, None]

"""Corpora of chats: how records are packed, what a run reads, and the error message of each mistake."""

import json
import random

import numpy as np
import pytest
from small_runs import build_small_corpus, reading_from_the_start

from zaya_jax.data.chats.chat_corpus import build_chat_corpus
from zaya_jax.data.chats.command import build_chats
from zaya_jax.data.chats.records import Message, read_chats
from zaya_jax.data.chats.templates.encoding import load_chat_format
from zaya_jax.data.chats.trimming import Trimming, drop_earlier_thoughts, fit
from zaya_jax.data.corpora.shards import fingerprint, open_corpus
from zaya_jax.data.reading.loader import evaluation_batches, num_sequences, training_batches
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer

LENGTH = 128
TOKENIZER = load_tokenizer("byte-chat")
FORMAT = load_chat_format(None, TOKENIZER)


def record(*contents):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return json.dumps({"messages": messages})


def records(num=60):
    numbers = random.Random(0)
    return [record(f"question {i}", "answer é " * numbers.randrange(1, 9)) for i in range(num)]


def write(path, lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def build(folder, source, **options):
    return build_chat_corpus(
        folder, source=source, tokenizer=TOKENIZER, **{"sequence_length": LENGTH, **options}
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write(tmp_path_factory.mktemp("chats") / "chats.jsonl", records())


@pytest.fixture(scope="module")
def report(source, tmp_path_factory):
    # Several shards, so that windows are read across their boundaries.
    folder = tmp_path_factory.mktemp("corpora") / "chats"
    return build(folder, source, validation_percent=20, shard_tokens=3 * LENGTH)


def segments_of(batches):
    """Yields each chat in the batches, as its tokens and its mask."""
    for batch in batches:
        for tokens_T, weights_T, segments_T in zip(
            batch.tokens_BT, batch.weights_BT, batch.segments_BT, strict=True
        ):
            for segment in range(1, segments_T.max() + 1):
                inside = segments_T == segment
                learned_T = np.concatenate([[0], weights_T[inside][:-1]])
                assert weights_T[inside][-1] == 0
                yield tokens_T[inside].tolist(), learned_T.tolist()


def test_every_chat_is_read_whole_and_once(report, source):
    """Over both splits, each chat has its own tokens and mask, and is in one window."""
    actual = []
    for split in ("train", "validation"):
        batches = evaluation_batches(report.corpus, split=split, sequence_length=LENGTH, batch_size=2)
        actual += segments_of(batches)
    encoded = [FORMAT.encode(chat.messages) for chat in read_chats(source)]
    expected = [(each.tokens_T.tolist(), each.learned_T.tolist()) for each in encoded]
    assert sorted(actual) == sorted(expected)
    assert len(report.corpus.train.shards) > 1
    assert report.trimmed == {Trimming.NOTHING: 60}
    assert sum(report.num_tokens.values()) == sum(map(len, encoded))
    assert sum(report.num_learned.values()) == sum(each.learned_T.sum() for each in encoded)
    best, first, _ = report.packings
    assert best.num_windows == report.corpus.train.num_blocks <= first.num_windows


def test_a_run_reads_each_window_once_per_epoch(report):
    corpus = report.corpus
    windows = num_sequences(corpus, "train", LENGTH)
    reading = reading_from_the_start({"c": corpus}, length=LENGTH)
    batches = training_batches(reading, {"c": corpus}, batch_size=1, num_steps=2 * windows)
    epochs = [batch.tokens_BT.tobytes() for batch in batches]
    in_order = evaluation_batches(corpus, split="train", sequence_length=LENGTH, batch_size=1)
    expected = sorted(batch.tokens_BT.tobytes() for batch in in_order)
    assert sorted(epochs[:windows]) == sorted(epochs[windows:]) == expected
    assert epochs[:windows] != epochs[windows:]
    (later,) = training_batches(reading.after(windows + 2), {"c": corpus}, batch_size=1, num_steps=1)
    assert later.tokens_BT.tobytes() == epochs[windows + 2]


def test_chats_and_documents_mix(report, tmp_path):
    documents = build_small_corpus(tmp_path / "documents")
    corpora = {"chats": report.corpus, "documents": documents}
    reading = reading_from_the_start(corpora, length=LENGTH, weights=(1, 3))
    (batch,) = training_batches(reading, corpora, batch_size=8, num_steps=1)
    assert batch.tokens_BT.shape == (8, LENGTH)
    has_borders = (batch.tokens_BT == FORMAT.end_id).any(axis=1)
    assert has_borders.sum() == 2
    # In documents every token but the first is learned; in chats only what the assistant wrote.
    shares = batch.weights_BT.sum(axis=1) / (batch.segments_BT > 0).sum(axis=1)
    assert (shares[~has_borders] > 0.9).all()
    assert (shares[has_borders] < 0.9).all()


def test_the_same_chats_yield_the_same_corpus(report, source, tmp_path):
    again = build(tmp_path / "again", source, validation_percent=20, shard_tokens=3 * LENGTH)
    assert fingerprint(again.corpus) == fingerprint(report.corpus)
    longer = build(tmp_path / "longer", source, validation_percent=20, sequence_length=2 * LENGTH)
    assert longer.corpus.validation.documents == report.corpus.validation.documents
    assert longer.corpus.train.num_blocks < report.corpus.train.num_blocks


def test_another_length_is_refused(report):
    with pytest.raises(
        ValueError, match=r"sequence_length is 64, but the chats of .* into windows of 128 tokens; set data"
    ):
        num_sequences(report.corpus, "train", 64)
    with pytest.raises(ValueError, match=r"data\.sequence_length is 256"):
        evaluation_batches(report.corpus, split="train", sequence_length=256, batch_size=1)


@pytest.mark.parametrize("percent", [1, 99])
@pytest.mark.parametrize("num", [2, 3, 5])
def test_each_split_has_a_window_of_its_own_chats(num, percent, tmp_path):
    source = write(tmp_path / "chats.jsonl", records(num) * 2)
    corpus = build(tmp_path / "corpus", source, validation_percent=percent).corpus
    assert corpus.train.documents + corpus.validation.documents == 2 * num
    assert min(corpus.train.num_blocks, corpus.validation.num_blocks) >= 1
    read = {
        split: {
            tuple(tokens)
            for tokens, _ in segments_of(
                evaluation_batches(corpus, split=split, sequence_length=LENGTH, batch_size=1)
            )
        }
        for split in ("train", "validation")
    }
    assert not read["train"] & read["validation"]


def test_a_single_chat_cannot_fill_both_splits(tmp_path):
    source = write(tmp_path / "chats.jsonl", records(1) * 3)
    with pytest.raises(ValueError, match="has 1 different chats that fit a window; at least two"):
        build(tmp_path / "corpus", source)
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", r":2 is not JSON"),
        ("[]", ":2 holds a list; it must be a JSON object"),
        ("{}", ':2 has no messages; a non-empty list of messages, "messages"'),
        ('{"messages": []}', ":2 has no messages"),
        ('{"messages": [3]}', ":2, message 1, has a int; a message has role and content"),
        ('{"messages": [{"role": "user"}]}', ":2, message 1, has role; a message has role and content"),
        (
            '{"messages": [{"role": "user", "content": "a", "function_call": {}}]}',
            "has role, content, function_call; a message has role and content, and optionally a name",
        ),
        ('{"messages": [{"role": "user", "content": null}]}', "has content that is null; it must be text"),
        ('{"messages": [{"role": "user\\n", "content": "a"}]}', 'has the role "user\n"; a role is a word'),
        (
            '{"messages": [{"role": "user", "content": "a\\ud800"}]}',
            "has half a surrogate pair at character 1",
        ),
        (record("a"), ":2: nothing in it is learned; a message of the assistant is required"),
        (b"\xff", ":2 is not JSON"),
    ],
)
def test_an_invalid_record_is_reported_with_its_location(line, sentence, tmp_path):
    source = tmp_path / "chats.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    source.write_bytes(records(1)[0].encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=sentence) as raised:
        build(tmp_path / "corpus", source)
    assert str(raised.value).startswith(f"{source}:2")
    assert not (tmp_path / "corpus").exists()


def test_chats_of_a_folder_and_empty_lines(tmp_path):
    (tmp_path / "chats/deep").mkdir(parents=True)
    write(tmp_path / "chats/b.jsonl", [records()[1], "", "  ", records()[2]])
    write(tmp_path / "chats/deep/a.jsonl", [records()[3]])
    write(tmp_path / "chats/readme.txt", ["no chat"])
    chats = list(read_chats(tmp_path / "chats"))
    assert [chat.messages[0].content for chat in chats] == [f"question {i}" for i in (1, 2, 3)]
    assert chats[1].location == f"{tmp_path}/chats/b.jsonl:4"
    with pytest.raises(
        ValueError, match=r"no chats found at .*; it must be a file of JSON Lines, or a folder of"
    ):
        list(read_chats(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sequence_length": 1}, "sequence_length is 1; it must be at least 2"),
        ({"validation_percent": 0}, "validation_percent is 0; it must be from 1 to 99"),
        ({"tokenizer": load_tokenizer("byte")}, '"byte-chat" has them'),
    ],
)
def test_invalid_arguments(options, sentence, source, tmp_path):
    options = {"tokenizer": TOKENIZER, "sequence_length": LENGTH} | options
    with pytest.raises(ValueError, match=sentence):
        build_chat_corpus(tmp_path / "corpus", source=source, **options)


def test_a_template_must_mark_what_is_learned(source, tmp_path):
    template = write(tmp_path / "plain.jinja", ["{{ messages[0].content }}"])
    with pytest.raises(ValueError, match=r"plain.jinja has no \{% generation %\} blocks, which mark what is"):
        build(tmp_path / "corpus", source, template=str(template))


def test_a_corpus_cannot_replace_its_source(tmp_path):
    build(tmp_path / "corpus", write(tmp_path / "chats.jsonl", records(4)))
    source = write(tmp_path / "corpus/chats.jsonl", records(4))
    with pytest.raises(
        ValueError, match=r"chats.jsonl are inside the corpus .*; --overwrite would delete them"
    ):
        build(tmp_path / "corpus", source, overwrite=True)
    with pytest.raises(ValueError, match="is already a corpus; --overwrite replaces it"):
        build(tmp_path / "corpus", tmp_path / "chats.jsonl")


def test_the_command_prints_its_statistics(tmp_path, capsys):
    lines = [*records(20), record("q", f"<think>{'hm ' * 99}</think>yes"), record("q", "x" * LENGTH)]
    source = write(tmp_path / "chats.jsonl", lines)
    build_chats([str(tmp_path / "corpus"), "--source", str(source), "--sequence-length", str(LENGTH)])
    printed = capsys.readouterr().out
    assert "not trimmed: 20 chats" in printed
    assert "last think block cut: 1 chats" in printed
    assert f"skipped, longer than a window: {source}:22\n" in printed
    assert "best-fit decreasing" in printed
    assert open_corpus(tmp_path / "corpus").left_out == {"longer than a window": 1}


# Trimming

THOUGHT, EARLIER = "abc defg hij", "earlier"
CHAT = [
    Message("user", "q"),
    Message("assistant", f"<think>\n{EARLIER}\n</think>\n\none"),
    Message("user", "r"),
    Message("assistant", f"<think>\n{THOUGHT}\n</think>\n\ntwo"),
]


def text_of(encoded):
    names = {number: name for name, number in FORMAT.specials.items()}
    return "".join(names.get(token) or TOKENIZER.decode([token]) for token in encoded.tokens_T.tolist())


def whole_text(earlier, thought):
    first = f"<think>\n{earlier}\n</think>\n\n" if earlier is not None else ""
    turns = [("user", "q"), ("assistant", f"{first}one"), ("user", "r")]
    turns.append(("assistant", f"<think>\n{thought}\n</think>\n\ntwo"))
    return "<bos>" + "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


def test_trimming_removes_as_little_as_possible_and_no_answer():
    full = len(FORMAT.encode(CHAT))
    dropped = len(FORMAT.encode(drop_earlier_thoughts(CHAT)))
    assert full - dropped == len(EARLIER) + 6
    seen = []
    for max_tokens in range(full + 2, 0, -1):
        actual = fit(CHAT, FORMAT, max_tokens=max_tokens)
        if actual is None:
            seen.append(None)
            continue
        encoded, trimming = actual
        assert len(encoded) <= max_tokens
        seen.append(trimming)
        kept = {
            Trimming.NOTHING: (EARLIER, THOUGHT),
            Trimming.TAIL: (EARLIER, THOUGHT[: max_tokens - full]),
            Trimming.EARLIER: (None, THOUGHT),
            Trimming.EARLIER_AND_TAIL: (None, THOUGHT[: max_tokens - dropped]),
        }
        assert text_of(encoded) == whole_text(*kept[trimming])
    stages = list(dict.fromkeys(seen))
    assert stages == [
        Trimming.NOTHING, Trimming.TAIL, Trimming.EARLIER, Trimming.EARLIER_AND_TAIL, None,
    ]  # fmt: skip
    # At least one character of the thought remains.
    assert seen.count(Trimming.TAIL) == seen.count(Trimming.EARLIER_AND_TAIL) == len(THOUGHT) - 1


@pytest.mark.parametrize(
    "contents",
    [
        ("q", "x" * 99),  # no thought
        ("<think>" + "x" * 99 + "</think>", "a"),  # a thought, but not of the assistant
        ("q", "<think>" + "x" * 99),  # a thought without an end counts as the answer
        ("q", "<think>x</think>" + "y" * 99),
    ],
)
def test_long_chats_without_thoughts_are_skipped(contents):
    messages = [Message(("user", "assistant")[i % 2], content) for i, content in enumerate(contents)]
    assert fit(messages, FORMAT, max_tokens=64) is None


def test_only_the_last_thought_of_a_message_is_cut():
    output = Message("assistant", "<think>first</think>a<think>second thought</think>b")
    messages = [Message("user", "q"), output]
    full = len(FORMAT.encode(messages))
    encoded, trimming = fit(messages, FORMAT, max_tokens=full - 8)
    assert trimming is Trimming.TAIL
    assert "<think>first</think>a<think>second</think>b<|im_end|>" in text_of(encoded)
    assert drop_earlier_thoughts(messages) == messages

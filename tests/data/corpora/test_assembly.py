"""A corpus has the same bytes with any number of processes, and after any interruption."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import zaya_jax
from zaya_jax.data.corpora import assembly
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.corpora.inspection import measure_lengths, samples
from zaya_jax.data.corpora.split import by_hash, choose_split_rule
from zaya_jax.data.reading.loader import evaluation_batches
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer

OPTIONS = {"block_tokens": 64, "shard_tokens": 640, "validation_percent": 30}


class CountingTokenizer(ByteTokenizer):
    """Counts its texts, and fails the build at a given one."""

    def __init__(self, last: int | None = None):
        self.texts, self._last = 0, last

    def encode(self, text: str) -> list[int]:
        self.texts += 1
        if self.texts == self._last:
            raise KeyboardInterrupt
        return super().encode(text)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(assembly, "PART_BYTES", 500)


@pytest.fixture
def source(tmp_path) -> pathlib.Path:
    numbers = random.Random(0)
    lines = [
        json.dumps({"text": "".join(numbers.choices("abc \né", k=numbers.randrange(1, 90)))})
        for _ in range(300)
    ]
    path = tmp_path / "web.jsonl"
    path.write_text("\n".join(lines))
    return path


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def build(folder, source, tokenizer=None, **options):
    return build_corpus(
        folder, source=str(source), tokenizer=tokenizer or ByteTokenizer(), **OPTIONS | options
    )


@pytest.fixture
def expected(tmp_path, source) -> dict[str, bytes]:
    corpus = build(tmp_path / "undisturbed", source)
    assert min(len(corpus.train.shards), len(corpus.validation.shards)) > 3
    return contents(corpus.folder)


def test_any_number_of_processes_writes_the_same_bytes(tmp_path, source, expected, monkeypatch):
    monkeypatch.setattr(assembly, "MIN_PARALLEL_BYTES", 0)
    corpus = build(tmp_path / "corpus", source, num_workers=2)
    assert contents(corpus.folder) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "undisturbed", "web.jsonl"]


@pytest.mark.parametrize("part_bytes", [1, 10**9])
def test_parts_of_any_size_yield_the_same_bytes(tmp_path, source, expected, monkeypatch, part_bytes):
    monkeypatch.setattr(assembly, "PART_BYTES", part_bytes)
    assert contents(build(tmp_path / "corpus", source).folder) == expected


def test_a_build_continues_after_an_interruption(tmp_path, source, expected):
    """After repeated interruptions, only the texts of the current part are tokenized twice."""
    done = 0
    for last in (40, 60, 90):
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "corpus", source, CountingTokenizer(last), resume=True)
        done += last
    rest = CountingTokenizer()
    corpus = build(tmp_path / "corpus", source, rest, resume=True)
    assert contents(corpus.folder) == expected
    assert 300 <= done + rest.texts <= 300 + 3 * 20
    assert not (tmp_path / ".corpus.building").exists()


def test_without_resume_nothing_is_left(tmp_path, source):
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "corpus", source, CountingTokenizer(100))
    assert [path.name for path in tmp_path.iterdir()] == ["web.jsonl"]


@pytest.mark.parametrize(
    "damage",
    ["a part", "a part lost", "a shard", "a shard's hashes", "a record", "another source", "another plan"],
)
def test_stale_work_is_repeated(tmp_path, source, damage):
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "corpus", source, CountingTokenizer(200), resume=True)
    work, options = tmp_path / ".corpus.building", {}
    part = max((work / "parts").glob("*.train"))
    if damage == "a part":
        part.write_bytes(bytes(len(part.read_bytes())))
    elif damage == "a part lost":
        part.unlink()
    elif damage == "a shard":
        (work / "corpus/train-00001.array_record").write_bytes(b"")
    elif damage == "a shard's hashes":
        (work / "shards/train-00001.hashes").write_bytes(bytes(160))
    elif damage == "a record":
        part.with_suffix(".json").write_text('{"key"')
    elif damage == "another source":
        source.write_text(source.read_text().replace("a", "d"))
    else:
        options = {"block_tokens": 32}
    corpus = build(tmp_path / "corpus", source, resume=True, **options)
    assert contents(corpus.folder) == contents(build(tmp_path / "whole", source, **options).folder)


def test_a_second_build_fails_at_once(tmp_path, source):
    """The second build does not touch the files of the first."""
    plan = {"any": "plan"}
    with assembly.building_folder(tmp_path / "corpus", plan, resume=True) as work:
        (work / "parts/0.json").touch()
        with pytest.raises(
            ValueError, match=r"another process is building .*corpus; wait for it, or stop it"
        ):
            build(tmp_path / "corpus", source, resume=True)
        assert (work / "parts/0.json").exists()


KILLED = """
import sys, time
from zaya_jax.data.corpora import assembly
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer
if __name__ == "__main__":
    assembly.PART_BYTES, assembly.MIN_PARALLEL_BYTES = 500, 0
    folder, source = sys.argv[1:]
    build_corpus(folder, source=source, tokenizer=ByteTokenizer(), resume=True, num_workers=2,
        block_tokens=64, shard_tokens=640, validation_percent=30, advance=lambda _: time.sleep(0.05))
"""


def test_a_killed_build_leaves_no_process_and_continues(tmp_path, source, expected):
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "killed.py"), str(tmp_path / "corpus"), str(source)]
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(zaya_jax.__file__).parents[1])}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    parts = tmp_path / ".corpus.building/parts"
    deadline = time.monotonic() + 120
    while len(list(parts.glob("*.json"))) < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    while _alive(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    done = CountingTokenizer()
    corpus = build(tmp_path / "corpus", source, done, resume=True)
    assert contents(corpus.folder) == expected
    assert 0 < done.texts < 300


def _alive(session: int) -> bool:
    """Whether a process of the session is running; a zombie is not."""
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_session) == session and state != "Z":
            return True
    return False


def test_duplicates_are_skipped_and_listed(tmp_path, source):
    lines = source.read_text().splitlines()
    different = len({json.loads(line)["text"] for line in lines})
    source.write_text("\n".join([*lines, *lines[:7]]))
    assert build(tmp_path / "all", source).left_out == {}
    corpus = build(tmp_path / "corpus", source, deduplicate=True)
    assert corpus.train.documents + corpus.validation.documents == different
    assert corpus.left_out == {"a duplicate": 307 - different}
    listed = [json.loads(line) for line in (corpus.folder / "left_out.jsonl").read_text().splitlines()]
    assert {each["record"] for each in listed} >= set(range(301, 308))


def _texts(corpus, name: str) -> list[str]:
    """Documents of a split, as the loader returns them."""
    windows = evaluation_batches(corpus, split=name, sequence_length=corpus.block_tokens, batch_size=1)
    tokens = np.concatenate([batch.tokens_BT[0] for batch in windows])
    pieces = np.split(tokens, np.flatnonzero(tokens == corpus.bos_id))[1:]
    return [ByteTokenizer().decode(piece.tolist()) for piece in pieces]


@pytest.mark.parametrize(
    ("texts", "train", "validation"),
    [
        (["1\n2\n3\n4\n5\n6\n7\n8\n9\n"], ["1\n2\n3\n4\n5\n6\n"], ["7\n8\n9\n"]),
        (["a long first line\nb"], ["a long first line\n"], ["b"]),
        (["b\na long last line"], ["b\n"], ["a long last line"]),
        (["some text", "b\nc\n"], ["some text", "b\n"], ["c\n"]),
        # Their keys are 31, 33 and 43: at 30% the lowest is held out.
        (["some text", "b", "a"], ["b", "a"], ["some text"]),
        (["some text"], ["some t"], ["ext"]),
        (["é"] * 2, None, None),
        (["éé"], ["é"], ["é"]),
        (["ab"] * 2, ["a"] * 2, ["b"] * 2),
    ],
)
def test_a_few_texts_fill_both_splits(tmp_path, texts, train, validation):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {"block_tokens": 2}
    if train is None:
        with pytest.raises(ValueError, match="is a single character"):
            build(tmp_path / "corpus", tmp_path / "in.jsonl", **options)
        return
    corpus = build(tmp_path / "corpus", tmp_path / "in.jsonl", **options)
    assert (_texts(corpus, "train"), _texts(corpus, "validation")) == (train, validation)


def test_without_training_texts_the_highest_key_is_trained_on():
    texts = [b"some text", b"b", b"a"]
    split_rule = choose_split_rule(texts, 90)
    assert [split_rule.split_of(raw) for raw in texts] == ["validation", "validation", "train"]
    assert "moved to the other side" in split_rule.describe()


def test_many_texts_are_split_by_their_hashes_only():
    texts = iter([b"%d\n%d" % (i, i) for i in range(1000)])
    assert choose_split_rule(texts, 5) == by_hash(5)
    assert next(texts, None) is not None  # not all texts were read


def test_lengths_and_samples(tmp_path):
    """Documents in several blocks; control characters are escaped."""
    lengths = [4, 5, 8, 200, 9, 8]
    texts = ["a" * (length - 2) for length in lengths[:-1]] + ["m\x1b\tbr"]
    (tmp_path / "in").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / f"in/{i}.txt").write_text(text)
    corpus = build(tmp_path / "corpus", tmp_path / "in", validation_percent=99, block_tokens=128)
    name = max(("train", "validation"), key=lambda name: corpus.split(name).documents)
    there = [len(text) + 2 for text in _texts(corpus, name)]
    actual = measure_lengths(corpus, name)
    assert list(actual.counts) == np.bincount(np.log2(there).astype(int)).tolist()
    assert (actual.whole, actual.longest) == (True, max(there))
    assert not measure_lengths(corpus, name, max_tokens=1).whole
    shown = [text.plain for text in samples(corpus, name, ByteTokenizer(), number=9)]
    assert "▶ m\\x1b\tbr ◀" in shown
    assert len(shown) == len(there) == 5


def test_tokens_without_a_loss_are_dim(tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text("question answer\n" * 3)
    corpus = build(tmp_path / "corpus", tmp_path / "in.txt")

    def masked(*arguments, **options):
        for batch in evaluation_batches(*arguments, **options):
            batch.weights_BT[0, :9] = 0  # nothing in "question " is learned
            yield batch

    monkeypatch.setattr("zaya_jax.data.corpora.inspection.evaluation_batches", masked)
    (text,) = samples(corpus, "train", ByteTokenizer(), number=1)
    (dim,) = [span for span in text.spans if span.style == "dim"]
    assert text.plain[dim.start : dim.end] == "question "

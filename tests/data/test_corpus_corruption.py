"""Whatever becomes of a file of a corpus is seen before a token of it is trained on."""

import dataclasses
import json
import os
import pathlib
import random
import shutil

import pytest
from small_runs import reading_from_the_start, write_texts

from zaya_jax import cli
from zaya_jax.data import shards
from zaya_jax.data.blocks import BlockReader
from zaya_jax.data.corpus import build_corpus
from zaya_jax.data.loader import evaluation_batches, training_batches
from zaya_jax.data.shards import Corpus, fingerprint, open_corpus, verify_corpus
from zaya_jax.data.tokenizer import ByteTokenizer

PAGE = 4096


class OtherLetters(ByteTokenizer):
    """Writes files of the same names and sizes, with other tokens."""

    def encode_bytes(self, raw):
        return [3 + (byte ^ 1) for byte in raw]


def build(folder: pathlib.Path, source: pathlib.Path, **options) -> Corpus:
    options = {"block_tokens": 256, "validation_percent": 20, "shard_tokens": 80 * 256} | options
    return build_corpus(folder, source=str(source), **{"tokenizer": ByteTokenizer()} | options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Corpus:
    """Two shards for training, one held out, and something that is left out."""
    root = tmp_path_factory.mktemp("whole")
    write_texts(root / "texts")
    (root / "texts/latin.txt").write_bytes(b"caf\xe9")
    return build(root / "corpus", root / "texts")


@pytest.fixture(scope="module")
def older(whole, tmp_path_factory) -> Corpus:
    """What an earlier version of the tokenizer may have left."""
    folder = tmp_path_factory.mktemp("older") / "corpus"
    return build(folder, whole.folder.parent / "texts", tokenizer=OtherLetters())


@pytest.fixture
def copy(whole, tmp_path) -> Corpus:
    shutil.copytree(whole.folder, tmp_path / "corpus")
    return dataclasses.replace(whole, folder=tmp_path / "corpus")


def names_of(corpus: Corpus) -> list[str]:
    return sorted(path.name for path in corpus.folder.iterdir())


def what_is_said(folder: pathlib.Path) -> str:
    """Why opening refuses a corpus; nothing if it does not."""
    try:
        open_corpus(folder)
    except ValueError as error:
        return str(error)
    return ""


def name_said(folder: pathlib.Path, name: str) -> str:
    """The file that a sentence names: with a mark that does not fit it is the manifest that is in doubt."""
    return f"{folder}/{'manifest.json' if name == 'committed' else name} "


def changes(corpus: Corpus, older: Corpus, name: str) -> dict[str, bytes]:
    """What a file may hold instead; what makes no difference to it is none."""
    raw = (corpus.folder / name).read_bytes()
    others = [each for each in names_of(corpus) if each.split("-")[0] == name.split("-")[0] != each != name]
    page = len(raw) // 2 // PAGE * PAGE
    found = {
        "cut in half": raw[: len(raw) // 2],
        "a byte shorter": raw[:-1],
        "emptied": b"",
        "longer": raw + b"\0",
        "a page of zeros": raw[:page] + bytes(len(raw[page : page + PAGE])) + raw[page + PAGE :],
        "all zeros": bytes(len(raw)),
        "stale": (older.folder / name).read_bytes(),
        **{f"swapped with {other}": (corpus.folder / other).read_bytes() for other in others},
    }
    return {what: content for what, content in found.items() if content != raw}


def check_flips(corpus: Corpus, count: int) -> int:
    checked = 0
    for seed, name in enumerate(names_of(corpus)):
        path = corpus.folder / name
        raw = path.read_bytes()
        for bit in random.Random(seed).sample(range(8 * len(raw)), min(count, 8 * len(raw))):
            with path.open("r+b") as stream:
                stream.seek(bit // 8)
                stream.write(bytes([raw[bit // 8] ^ 1 << bit % 8]))
            assert name_said(corpus.folder, name) in what_is_said(corpus.folder), (name, bit)
            path.write_bytes(raw)
            checked += 1
    open_corpus(corpus.folder)
    return checked


def test_a_corpus_has_every_kind_of_file(whole, older):
    names = names_of(whole)
    assert names == names_of(older) == [
        "committed", "left_out.jsonl", "manifest.json",
        "train-00000.array_record", "train-00001.array_record", "train.block_hashes",
        "validation-00000.array_record", "validation.block_hashes",
    ]  # fmt: skip
    same_size = [
        (whole.folder / name).stat().st_size == (older.folder / name).stat().st_size for name in names
    ]
    assert all(same_size[3:]), "what is stale must not be told by its size"
    assert whole.left_out == {"not UTF-8": 1}


def test_a_flipped_bit_is_seen(copy):
    assert check_flips(copy, 20) == 8 * 20


@pytest.mark.campaign
def test_two_hundred_flipped_bits_of_each_file_are_seen(copy):
    """What the fast one shows of twenty, for a figure to quote."""
    assert check_flips(copy, 200) == 8 * 200


def test_whatever_becomes_of_a_file_is_seen(copy, older):
    for name in names_of(copy):
        path = copy.folder / name
        raw = path.read_bytes()
        for what, content in changes(copy, older, name).items():
            path.write_bytes(content)
            assert name_said(copy.folder, name) in what_is_said(copy.folder), (name, what)
        path.unlink()
        said = what_is_said(copy.folder)
        assert f"{path} is missing" in said or f"it has no {name}" in said
        path.write_bytes(raw)
    open_corpus(copy.folder)


@pytest.mark.timeout(20)
def test_what_was_not_written_is_seen(copy):
    more = copy.folder / "train-00009.array_record"
    more.write_bytes(b"")
    assert f"{more} is not in manifest.json" in what_is_said(copy.folder)
    more.unlink()
    (copy.folder / "tokenizer.json").write_text("of the user, who keeps it there")
    open_corpus(copy.folder)
    (copy.folder / "tokenizer.json").unlink()
    for name in names_of(copy):
        path, aside = copy.folder / name, copy.folder.parent / "aside"
        path.rename(aside)
        os.mkfifo(path)  # reading it would take for ever
        assert name in what_is_said(copy.folder)
        path.unlink()
        aside.rename(path)


@pytest.fixture
def large(monkeypatch):
    """Has opening take every corpus for one that is too large to be read there."""
    monkeypatch.setattr(shards, "HASHED_AT_OPENING", -1)


def read_split(corpus: Corpus, name: str) -> list[bytes]:
    reader = BlockReader(corpus, name)
    return [reader[i] for i in range(corpus.split(name).num_blocks)]


def read_all(folder: pathlib.Path) -> list[bytes] | str:
    """The blocks of a corpus, or why they are not read."""
    try:
        corpus = open_corpus(folder)
        return [block for split in ("train", "validation") for block in read_split(corpus, split)]
    except ValueError as error:
        return str(error)


def test_of_a_large_corpus_no_wrong_token_is_read(copy, older, large):
    """Each block is what was written or none; padding between ArrayRecord's chunks may be anything."""
    expected = read_all(copy.folder)
    refused, read = set(), set()
    for name in names_of(copy):
        path = copy.folder / name
        raw = path.read_bytes()
        flips = {f"flip {i}": raw[:i] + bytes([raw[i] ^ 4]) + raw[i + 1 :] for i in range(0, len(raw), 2999)}
        for what, content in (changes(copy, older, name) | flips).items():
            path.write_bytes(content)
            found = read_all(copy.folder)
            assert found == expected or name_said(copy.folder, name) in found, (name, what)
            (read if found == expected else refused).add((name, what.partition(" ")[0]))
        path.write_bytes(raw)
    shard_names = [path.name for split in ("train", "validation") for path in copy.shard_paths(split)]
    assert refused >= {(name, what) for name in shard_names for what in ("cut", "stale", "flip", "all")}
    assert refused >= {(name, "swapped") for name in shard_names[:2]}
    assert refused >= {(f"{split}.block_hashes", "stale") for split in ("train", "validation")}
    assert {name for name, _ in read} <= {"left_out.jsonl", *shard_names}


def test_a_corpus_that_is_replaced_under_a_run_is_not_read(whole, tmp_path):
    """As by `zaya data build --overwrite`: what a run has open it reads on, the rest is of another corpus."""
    source, options = whole.folder.parent / "texts", {"shard_tokens": 4 * 256}
    corpus = build(tmp_path / "corpus", source, **options)
    reading = reading_from_the_start({"c": corpus}, length=64)
    batches = training_batches(reading, {"c": corpus}, batch_size=1, num_steps=200)
    undisturbed = training_batches(reading, {"c": corpus}, batch_size=1, num_steps=200)
    expected = [batch.tokens_BT.tobytes() for batch in undisturbed]
    given = [next(batches).tokens_BT.tobytes()]
    build(tmp_path / "corpus", source, **options, tokenizer=OtherLetters(), overwrite=True)
    with pytest.raises(ValueError, match=r"train.* is not as it was written") as error:
        given.extend(batch.tokens_BT.tobytes() for batch in batches)
    assert given == expected[: len(given)]
    assert cli._is_ours(error.value)


def test_held_out_batches_are_held_against_their_hashes_too(copy, older, large):
    name = "validation-00000.array_record"
    shutil.copy(older.folder / name, copy.folder / name)
    batches = evaluation_batches(
        open_corpus(copy.folder), split="validation", sequence_length=64, batch_size=4
    )
    with pytest.raises(ValueError, match=rf"{name} is not as it was written: its block \d+ is another"):
        list(batches)


def test_the_command_reads_a_corpus_of_any_size(copy, large, capsys):
    cli.main(["data", "verify", str(copy.folder)])
    size = sum(path.stat().st_size for path in copy.folder.iterdir() if path.name in copy.files)
    assert (
        capsys.readouterr().out == f"verified: all {size:,} bytes of {copy.folder} are as they were written\n"
    )
    path = copy.shard_paths("train")[1]
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + b"\1")  # in ArrayRecord's padding, which nobody reads
    open_corpus(copy.folder)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["data", "verify", str(copy.folder)])
    assert leaving.value.code == 65
    assert f"{path} is not as it was written: its hash differs" in capsys.readouterr().err
    with pytest.raises(ValueError, match="its hash differs"):
        verify_corpus(copy.folder)


def test_a_corpus_without_hashes_is_to_be_rebuilt(copy):
    path = copy.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": "zaya_jax corpus 1"}))
    (copy.folder / "committed").unlink()
    with pytest.raises(
        ValueError, match=r"has no hashes of its files, .* rebuild it with zaya data build --over"
    ):
        open_corpus(copy.folder)


def test_fingerprints_tell_tokens_apart_and_nothing_else(whole, older, tmp_path):
    source = whole.folder.parent / "texts"
    shutil.copytree(source, tmp_path / "texts")
    (tmp_path / "texts/latin.txt").write_bytes(b"\xff")  # is in no corpus
    same = build(tmp_path / "corpus", tmp_path / "texts")
    assert fingerprint(same) == fingerprint(whole) == fingerprint(open_corpus(whole.folder))
    others = [
        fingerprint(each)
        for each in (
            whole,
            older,
            build(tmp_path / "a", source, block_tokens=128),
            build(tmp_path / "b", source, validation_percent=40),
            dataclasses.replace(whole, tokenizer_fingerprint="another"),
        )
    ]
    assert len(set(others)) == len(others)

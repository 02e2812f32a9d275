"""Any damage to a file of a corpus is detected before a token of it is trained on."""

import dataclasses
import os
import pathlib
import random
import shutil

import numpy as np
import pytest
from small_runs import reading_from_the_start, write_texts

from zaya_jax import cli
from zaya_jax.data.corpora import held_out_bytes, shards
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.corpora.shards import Corpus, fingerprint, open_corpus, verify_corpus
from zaya_jax.data.corpora.token_blocks import BlockReader
from zaya_jax.data.reading.loader import evaluation_batches, training_batches
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer
from zaya_jax.errors import DamagedError, UserError

PAGE = 4096


class OtherLetters(ByteTokenizer):
    """Writes files of the same names and sizes with other tokens."""

    def encode_bytes(self, raw):
        return [3 + (byte ^ 1) for byte in raw]


def build(folder: pathlib.Path, source: pathlib.Path, **options) -> Corpus:
    options = {"block_tokens": 256, "validation_percent": 20, "shard_tokens": 80 * 256} | options
    return build_corpus(folder, source=str(source), **{"tokenizer": ByteTokenizer()} | options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Corpus:
    """Two shards for training, one held out, and one skipped file."""
    root = tmp_path_factory.mktemp("whole")
    write_texts(root / "texts")
    (root / "texts/latin.txt").write_bytes(b"caf\xe9")
    return build(root / "corpus", root / "texts")


@pytest.fixture(scope="module")
def older(whole, tmp_path_factory) -> Corpus:
    """A file that an earlier version of the tokenizer may have left."""
    folder = tmp_path_factory.mktemp("older") / "corpus"
    return build(folder, whole.folder.parent / "texts", tokenizer=OtherLetters())


@pytest.fixture
def copy(whole, tmp_path) -> Corpus:
    shutil.copytree(whole.folder, tmp_path / "corpus")
    return dataclasses.replace(whole, folder=tmp_path / "corpus")


def names_of(corpus: Corpus) -> list[str]:
    return sorted(path.name for path in corpus.folder.iterdir())


def what_is_said(folder: pathlib.Path) -> str:
    """The error with which opening rejects a corpus; None if it accepts it."""
    try:
        open_corpus(folder)
    except ValueError as error:
        return str(error)
    return ""


def name_said(folder: pathlib.Path, name: str) -> str:
    """The file that an error names; if the marker does not match, this is the manifest."""
    return f"{folder}/{'manifest.json' if name == 'committed' else name} "


def changes(corpus: Corpus, older: Corpus, name: str) -> dict[str, bytes]:
    """Damaged contents of a file; those without an effect are omitted."""
    raw = (corpus.folder / name).read_bytes()
    others = [each for each in names_of(corpus) if each.split("-")[0] == name.split("-")[0] != each != name]
    page = len(raw) // 2 // PAGE * PAGE
    actual = {
        "cut in half": raw[: len(raw) // 2],
        "a byte shorter": raw[:-1],
        "emptied": b"",
        "longer": raw + b"\0",
        "a page of zeros": raw[:page] + bytes(len(raw[page : page + PAGE])) + raw[page + PAGE :],
        "all zeros": bytes(len(raw)),
        "stale": (older.folder / name).read_bytes(),
        **{f"swapped with {other}": (corpus.folder / other).read_bytes() for other in others},
    }
    return {what: content for what, content in actual.items() if content != raw}


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
        "validation-00000.array_record", "validation.block_hashes", "validation.token_bytes",
    ]  # fmt: skip
    same_size = [
        (whole.folder / name).stat().st_size == (older.folder / name).stat().st_size for name in names
    ]
    assert all(same_size[3:]), "what is stale must not be told by its size"
    assert whole.left_out == {"not UTF-8": 1}


@pytest.mark.parametrize("change", ["flipped", "cut", "missing"])
def test_damaged_bytes_of_held_out_tokens_are_rejected(copy, change):
    """The same for a corpus that is too large to be hashed when it is opened."""
    path = copy.folder / held_out_bytes.FILE
    raw = path.read_bytes()
    expected = np.frombuffer(raw, "<u4")[:11].sum()
    assert held_out_bytes.held_out_text_bytes(copy, 10) == expected
    if change == "missing":
        path.unlink()
    else:
        path.write_bytes(raw[:-4] if change == "cut" else raw[:40] + bytes([raw[40] ^ 1]) + raw[41:])
    with pytest.raises(DamagedError, match="token_bytes is not as it was written"):
        held_out_bytes.held_out_text_bytes(copy, 10)
    path.write_bytes(raw)


def test_a_flipped_bit_is_detected(copy):
    assert check_flips(copy, 20) == 9 * 20


@pytest.mark.campaign
def test_two_hundred_flipped_bits_of_each_file_are_detected(copy):
    """How many of twenty damages the fast check detects, for the documentation."""
    assert check_flips(copy, 200) == 9 * 200


def test_any_damage_of_a_file_is_detected(copy, older):
    for name in names_of(copy):
        path = copy.folder / name
        raw = path.read_bytes()
        for what, content in changes(copy, older, name).items():
            path.write_bytes(content)
            assert name_said(copy.folder, name) in what_is_said(copy.folder), (name, what)
        path.unlink()
        output = what_is_said(copy.folder)
        assert f"{path} is missing" in output or f"it has no {name}" in output
        path.write_bytes(raw)
    open_corpus(copy.folder)


@pytest.mark.timeout(20)
def test_unexpected_files_are_detected(copy):
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
        os.mkfifo(path)  # reading it would block forever
        assert name in what_is_said(copy.folder)
        path.unlink()
        aside.rename(path)


@pytest.fixture
def large(monkeypatch):
    """Treats every corpus as too large to be hashed when it is opened."""
    monkeypatch.setattr(shards, "HASHED_AT_OPENING", -1)


def read_split(corpus: Corpus, name: str) -> list[bytes]:
    reader = BlockReader(corpus, name)
    return [reader[i] for i in range(corpus.split(name).num_blocks)]


def read_all(folder: pathlib.Path) -> list[bytes] | str:
    """The blocks of a corpus, or the error of reading them."""
    try:
        corpus = open_corpus(folder)
        return [block for split in ("train", "validation") for block in read_split(corpus, split)]
    except ValueError as error:
        return str(error)


def test_no_wrong_token_of_a_large_corpus_is_read(copy, older, large):
    """Each block is as written or rejected; padding between ArrayRecord's chunks may differ."""
    expected = read_all(copy.folder)
    refused, read = set(), set()
    for name in names_of(copy):
        path = copy.folder / name
        raw = path.read_bytes()
        flips = {f"flip {i}": raw[:i] + bytes([raw[i] ^ 4]) + raw[i + 1 :] for i in range(0, len(raw), 2999)}
        for what, content in (changes(copy, older, name) | flips).items():
            path.write_bytes(content)
            actual = read_all(copy.folder)
            assert actual == expected or name_said(copy.folder, name) in actual, (name, what)
            (read if actual == expected else refused).add((name, what.partition(" ")[0]))
        path.write_bytes(raw)
    shard_names = [path.name for split in ("train", "validation") for path in copy.shard_paths(split)]
    assert refused >= {(name, what) for name in shard_names for what in ("cut", "stale", "flip", "all")}
    assert refused >= {(name, "swapped") for name in shard_names[:2]}
    assert refused >= {(f"{split}.block_hashes", "stale") for split in ("train", "validation")}
    assert {name for name, _ in read} <= {"left_out.jsonl", held_out_bytes.FILE, *shard_names}


def test_a_corpus_replaced_during_a_run_is_not_read(whole, tmp_path):
    """As by `zaya data build --overwrite`: a run reads on from open files, and the rest is rejected."""
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
    assert isinstance(error.value, UserError)


def test_held_out_batches_are_verified_too(copy, older, large):
    name = "validation-00000.array_record"
    shutil.copy(older.folder / name, copy.folder / name)
    batches = evaluation_batches(
        open_corpus(copy.folder), split="validation", sequence_length=64, batch_size=4
    )
    with pytest.raises(
        ValueError, match=rf"{name} is not as it was written: the hash of its block \d+ differs"
    ):
        list(batches)


def test_the_command_verifies_a_corpus_of_any_size(copy, large, capsys):
    cli.main(["data", "verify", str(copy.folder)])
    size = sum(path.stat().st_size for path in copy.folder.iterdir() if path.name in copy.files)
    assert capsys.readouterr().out == f"verified: all {size:,} bytes of {copy.folder} match their hashes\n"
    path = copy.shard_paths("train")[1]
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + b"\1")  # in ArrayRecord's padding, which is never read
    open_corpus(copy.folder)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["data", "verify", str(copy.folder)])
    assert leaving.value.code == 65
    assert f"{path} is not as it was written: its hash differs" in capsys.readouterr().err
    with pytest.raises(ValueError, match="its hash differs"):
        verify_corpus(copy.folder)


def test_fingerprints_depend_on_tokens_only(whole, older, tmp_path):
    source = whole.folder.parent / "texts"
    shutil.copytree(source, tmp_path / "texts")
    (tmp_path / "texts/latin.txt").write_bytes(b"\xff")  # is not in any corpus
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

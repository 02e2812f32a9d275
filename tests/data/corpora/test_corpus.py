import contextlib
import gzip
import hashlib
import json
import lzma
import os
import pathlib
import random
import re
import socket

import numpy as np
import pytest
from array_record.python import array_record_module

from zaya_jax.config import DataConfig
from zaya_jax.data.corpora import corpus as corpus_module
from zaya_jax.data.corpora.command import main
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.corpora.ensure import ensure_corpus
from zaya_jax.data.corpora.shards import open_corpus
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer
from zaya_jax.files.durable import content_hash

TOKENIZER = ByteTokenizer()


@pytest.fixture
def source(tmp_path):
    """Fifty texts of 1 to 360 bytes in three folders."""
    root = tmp_path / "source"
    rng = np.random.default_rng(0)
    for i in range(50):
        path = root / f"folder{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(rng.choice(list("abc\né漢"), rng.integers(1, 120))), encoding="utf-8")
    return root


def _build(tmp_path, source, *, name="corpus", **options):
    options = {"tokenizer": TOKENIZER, "block_tokens": 64, "validation_percent": 30, **options}
    return build_corpus(tmp_path / name, source=str(source), **options)


def _read_stream(corpus, split):
    """All tokens of a split, including padding, read without the loader."""
    records = []
    for path in corpus.shard_paths(split):
        reader = array_record_module.ArrayRecordReader(str(path))
        records += reader.read_all()
        reader.close()
    return np.frombuffer(b"".join(records), corpus.dtype)


def _read_documents(corpus, split):
    """The texts of a split: everything between BOS and EOS."""
    tokens = _read_stream(corpus, split)[: corpus.split(split).tokens]
    documents = np.split(tokens, np.flatnonzero(tokens == corpus.bos_id)[1:])
    assert all(d[0] == corpus.bos_id and d[-1] == corpus.eos_id for d in documents)
    return [TOKENIZER.decode(d.tolist()) for d in documents]


def _read_texts(root):
    return sorted(p.read_bytes().decode() for p in root.rglob("*.txt"))


def _write_texts(root, texts):
    root.mkdir(parents=True)
    for i, text in enumerate(texts):
        (root / f"{i}.txt").write_text(text, encoding="utf-8")
    return root


def _edit_manifest(corpus, change):
    """The marker is rewritten, as an attacker would: it must not be the only protection."""
    path = corpus.folder / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    (corpus.folder / "committed").write_text(content_hash(path) + "\n")


def test_both_splits_together_have_every_document_once(tmp_path, source):
    corpus = _build(tmp_path, source)
    train, validation = _read_documents(corpus, "train"), _read_documents(corpus, "validation")
    assert sorted(train + validation) == _read_texts(source)
    assert len(train) == corpus.train.documents
    assert len(validation) == corpus.validation.documents
    assert 5 <= len(validation) <= 25


def test_a_text_is_in_one_split_in_corpora_of_overlapping_folders(tmp_path, source):
    outer, inner = _build(tmp_path, source), _build(tmp_path, source / "folder1", name="inner")
    sides = {
        name: (set(_read_documents(outer, name)), set(_read_documents(inner, name)))
        for name in ("train", "validation")
    }
    assert all(inner_texts < outer_texts for outer_texts, inner_texts in sides.values())
    assert all(len(inner_texts) > 2 for _, inner_texts in sides.values())


def test_copies_of_a_text_are_in_one_split(tmp_path, source):
    (source / "copies").mkdir()
    for i, path in enumerate(sorted(source.rglob("*.txt"))):
        (source / "copies" / f"renamed{i}.txt").write_bytes(path.read_bytes())
    corpus = _build(tmp_path, source)
    train, validation = _read_documents(corpus, "train"), _read_documents(corpus, "validation")
    assert len(train) + len(validation) == 100
    assert not set(train) & set(validation)


# The first 64 bits of each text's BLAKE2b hash, modulo 100.
BUCKETS = {"some text": 31, "b": 33, "a": 43}


def _hash_by_hand(text):
    return int(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), 16)


@pytest.mark.parametrize(
    ("percent", "held_out"),
    [(32, {"some text"}), (33, {"some text"}), (34, {"some text", "b"}), (43, {"some text", "b"})],
)
def test_a_text_is_held_out_when_its_hash_is_below_the_percentage(tmp_path, percent, held_out):
    """At 33 and at 43 there is a text whose hash equals the percentage."""
    assert {text: _hash_by_hand(text) % 100 for text in BUCKETS} == BUCKETS
    corpus = _build(tmp_path, _write_texts(tmp_path / "source", BUCKETS), validation_percent=percent)
    assert set(_read_documents(corpus, "validation")) == held_out
    assert set(_read_documents(corpus, "train")) == set(BUCKETS) - held_out


def test_texts_are_ordered_by_the_hashes_of_their_paths(tmp_path):
    """The start of a split, which is all that a short evaluation reads, has texts of all folders."""
    texts = {f"folder{i // 10}/{i}.txt": f"text {i}" for i in range(30)}
    for path, text in texts.items():
        (tmp_path / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / path).write_text(text)
    corpus = _build(tmp_path, tmp_path / "source")
    in_order = [texts[path] for path in sorted(texts, key=_hash_by_hand)]
    for name in ("train", "validation"):
        documents = _read_documents(corpus, name)
        assert len(documents) > 3
        assert documents == [text for text in in_order if text in documents]


def test_counts_and_compressed_sizes(tmp_path, source):
    corpus = _build(tmp_path, source)
    for name in ("train", "validation"):
        split, raw = corpus.split(name), "".join(_read_documents(corpus, name)).encode()
        assert split.text_bytes == len(raw)
        assert split.tokens == len(raw) + 2 * split.documents
        assert split.skipped == 0
    held_out = "".join(_read_documents(corpus, "validation")).encode()
    assert corpus.validation.gzip_9_bytes == len(gzip.compress(held_out, 9))
    assert corpus.validation.xz_9_bytes == len(lzma.compress(held_out, preset=9))
    assert corpus.train.gzip_9_bytes is None


def test_compressors_are_at_their_highest_level(tmp_path):
    """The text repeats after more than the 8 MiB that xz -6 looks back, so that xz -9 makes a difference."""
    words = " ".join(random.Random(0).choices(["shard", "split", "corpus", "held", "out", "é"], k=20_000))
    held_out, trained = words + "\n" * 2**23 + words, "16"
    percent = _hash_by_hand(held_out) % 100 + 1
    assert percent <= _hash_by_hand(trained) % 100
    source = _write_texts(tmp_path / "source", [held_out, trained])
    split = _build(tmp_path, source, validation_percent=percent, block_tokens=2**16).validation
    raw = held_out.encode()
    assert split.gzip_9_bytes == len(gzip.compress(raw, 9)) != len(gzip.compress(raw, 6))
    assert split.xz_9_bytes == len(lzma.compress(raw, preset=9)) != len(lzma.compress(raw, preset=6))


def test_stream_is_cut_into_padded_blocks_over_shards(tmp_path, source):
    corpus = _build(tmp_path, source, shard_tokens=3 * 64)
    split = corpus.train
    assert len(split.shards) > 2
    assert {shard.records for shard in split.shards[:-1]} == {3}
    tokens = _read_stream(corpus, "train")
    assert len(tokens) == split.num_blocks * 64
    assert 0 <= len(tokens) - split.tokens < 64
    assert (tokens[split.tokens :] == corpus.pad_id).all()
    assert (tokens[: split.tokens] != corpus.pad_id).all()
    whole = _build(tmp_path, source, name="whole")
    np.testing.assert_array_equal(_read_stream(whole, "train"), tokens)


def test_same_tree_gives_the_same_corpus_elsewhere(tmp_path, source):
    first = _build(tmp_path, source)
    moved = source.rename(tmp_path / "moved")
    second = _build(tmp_path, moved, name="second")
    for name in ("train", "validation"):
        np.testing.assert_array_equal(_read_stream(first, name), _read_stream(second, name))


def test_an_added_file_moves_no_other_to_another_split(tmp_path, source):
    before = _read_documents(_build(tmp_path, source), "validation")
    (source / "new.txt").write_text("new")
    after = _read_documents(_build(tmp_path, source, name="after"), "validation")
    assert [text for text in after if text != "new"] == before


def test_skipped_files(tmp_path, source):
    texts = _read_texts(source)
    (source / "latin.txt").write_bytes("é".encode("latin-1"))
    (source / "empty.txt").write_bytes(b"")
    (source / "other.md").write_text("another name")
    (source / ".hidden.txt").write_text("hidden")
    (source / ".git").mkdir()
    (source / ".git" / "object.txt").write_text("hidden")
    corpus = _build(tmp_path, source, pattern="*.txt")
    assert sorted(_read_documents(corpus, "train") + _read_documents(corpus, "validation")) == texts
    assert corpus.train.skipped + corpus.validation.skipped == 2


def test_text_is_kept_byte_for_byte(tmp_path, source):
    (source / "newlines.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\rc\x00")
    corpus = _build(tmp_path, source)
    documents = _read_documents(corpus, "train") + _read_documents(corpus, "validation")
    assert "\ufeffa\r\nb\rc\x00" in documents


def test_large_vocabulary_takes_four_bytes_per_token(tmp_path, source):
    class Wide(ByteTokenizer):
        def __init__(self, vocab_size):
            self.vocab_size = vocab_size

        def encode(self, text):
            return [self.vocab_size - 1] * len(text)

    for vocab_size, dtype in ((2**16, "<u2"), (2**16 + 1, "<u4")):
        corpus = _build(tmp_path, source, tokenizer=Wide(vocab_size), overwrite=True)
        assert corpus.dtype == dtype
        assert _read_stream(corpus, "train").max() == vocab_size - 1


def test_padding_is_the_tokenizers_own(tmp_path, source):
    class Padded(ByteTokenizer):
        vocab_size = 260
        pad_id = 259

    corpus = _build(tmp_path, source, tokenizer=Padded())
    for name in ("train", "validation"):
        padding = _read_stream(corpus, name)[corpus.split(name).tokens :]
        assert set(padding) == {259}


def test_opening_returns_the_built_corpus(tmp_path, source):
    corpus = _build(tmp_path, source)
    assert open_corpus(tmp_path / "corpus") == corpus
    assert corpus.folder == tmp_path / "corpus"
    moved = (tmp_path / "corpus").rename(tmp_path / "moved")
    assert open_corpus(moved).train == corpus.train


def test_exception_during_the_build_leaves_nothing(tmp_path, source, monkeypatch):
    parent = tmp_path / "corpora"
    monkeypatch.setattr(corpus_module, "write_manifest", _fail)
    with pytest.raises(RuntimeError, match="disk on fire"):
        _build(parent, source)
    assert list(parent.iterdir()) == []


def _fail(*_):
    raise RuntimeError("disk on fire")


def test_shard_damaged_during_the_build_leaves_nothing(tmp_path, source, monkeypatch):
    write_manifest = corpus_module.write_manifest

    def damage(corpus):
        write_manifest(corpus)
        corpus.shard_paths("train")[0].write_bytes(b"")

    parent = tmp_path / "corpora"
    monkeypatch.setattr(corpus_module, "write_manifest", damage)
    with pytest.raises(ValueError, match="has 0 bytes, but the manifest says"):
        _build(parent, source)
    assert list(parent.iterdir()) == []


def test_exception_between_two_texts_leaves_nothing(tmp_path, source):
    class Failing(ByteTokenizer):
        texts = 0

        def encode(self, text):
            self.texts += 1
            return super().encode(text) if self.texts < 40 else _fail()

    parent = tmp_path / "corpora"
    with pytest.raises(RuntimeError, match="disk on fire"):
        _build(parent, source, tokenizer=Failing())
    assert list(parent.iterdir()) == []


def test_failed_overwrite_leaves_the_old_corpus(tmp_path, source, monkeypatch):
    old = _build(tmp_path, source)
    monkeypatch.setattr(corpus_module, "write_manifest", _fail)
    with pytest.raises(RuntimeError, match="disk on fire"):
        _build(tmp_path, source, overwrite=True)
    assert open_corpus(old.folder) == old
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus", "source"]


def test_overwrite_replaces_a_corpus_and_only_a_corpus(tmp_path, source):
    _build(tmp_path, source)
    with pytest.raises(ValueError, match="is already a corpus; --overwrite replaces it"):
        _build(tmp_path, source)
    assert _build(tmp_path, source, overwrite=True, block_tokens=32).block_tokens == 32
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus", "source"]
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("do not lose")
    with pytest.raises(
        ValueError, match=r"contains files but no manifest\.json; it must be empty, or a corpus"
    ):
        _build(tmp_path, source, name="precious", overwrite=True)
    assert (precious / "thesis.txt").exists()


def test_empty_folder_is_accepted(tmp_path, source):
    (tmp_path / "corpus").mkdir()
    assert _build(tmp_path, source).train.documents


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"block_tokens": 1}, "block_tokens is 1; it must be at least 2"),
        ({"validation_percent": 0}, "validation_percent is 0; it must be from 1 to 99"),
        ({"validation_percent": 100}, "validation_percent is 100; it must be from 1 to 99"),
        ({"shard_tokens": 0}, "shard_tokens is 0; it must be above 0"),
        ({"pattern": "*.xyz"}, r'no file in .* has a name that matches "\*\.xyz"; a corpus needs some text'),
        ({"name": "source/corpus"}, "is inside its own source .*; choose another folder"),
    ],
)
def test_invalid_arguments(tmp_path, source, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        _build(tmp_path, source, **options)


def test_missing_source(tmp_path):
    with pytest.raises(ValueError, match=r'the source .*nowhere does not exist; it must be .* or "stdlib"'):
        _build(tmp_path, tmp_path / "nowhere")


def test_folder_that_is_a_file(tmp_path, source):
    (tmp_path / "corpus").write_text("")
    with pytest.raises(ValueError, match="corpus is a file; a corpus is a folder"):
        _build(tmp_path, source)


def test_source_without_readable_text(tmp_path):
    root = tmp_path / "source"
    root.mkdir()
    (root / "a").write_bytes(b"\xff")
    (root / "b").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r'all files like "\*" in .* are without text \(1 empty, 1 not UTF-8\)'
    ):
        _build(tmp_path, root)
    assert not (tmp_path / "corpus").exists()


def test_folder_without_manifest(tmp_path):
    with pytest.raises(
        ValueError, match=r"no corpus at .*: it has no manifest\.json; zaya data build creates one"
    ):
        open_corpus(tmp_path)


def test_missing_corpus_with_a_similar_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("docs", "notes"):
        (tmp_path / "corpora" / name).mkdir(parents=True)
        (tmp_path / "corpora" / name / "manifest.json").touch()
    (tmp_path / "corpora" / "dcoss").mkdir()  # a closer name, but not a corpus
    with pytest.raises(ValueError, match="no corpus") as caught:
        open_corpus("corpora/dcos")
    assert str(caught.value) == (
        "there is no corpus at corpora/dcos (did you mean corpora/docs?); zaya data build corpora/dcos "
        "--source TEXTS creates one"
    )


@pytest.mark.parametrize("missing", ["web", "corpora/web", "python_documentation"])
def test_missing_corpus_without_a_similar_name(tmp_path, monkeypatch, missing):
    """`corpora` does not exist either."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "docs",
        ".python_documentation.0123456789ab.partial",
    ):  # the second one is under construction
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    with pytest.raises(
        ValueError,
        match=f"^there is no corpus at {missing}; zaya data build {missing} --source TEXTS creates one$",
    ):
        open_corpus(missing)


def test_array_record_counts_a_truncated_file_as_empty_and_complains_only_when_closed(tmp_path, source):
    """Shows why a manifest is needed: if this fails, ArrayRecord has learned to detect the damage."""
    corpus = _build(tmp_path, source)
    (path,) = corpus.shard_paths("train")
    path.write_bytes(path.read_bytes()[:-100])
    reader = array_record_module.ArrayRecordReader(str(path))
    assert reader.num_records() == 0
    with pytest.raises(RuntimeError, match="Corrupted"):
        reader.close()


def test_every_damaged_shard_is_named(tmp_path, source):
    corpus = _build(tmp_path, source, shard_tokens=64)
    truncated, missing, emptied, grown, *_ = corpus.shard_paths("train")
    raw = truncated.read_bytes()
    truncated.write_bytes(raw[:-100])
    missing.unlink()
    emptied.write_bytes(bytes(emptied.stat().st_size))
    grown.write_bytes(grown.read_bytes() + b"\x00")
    with pytest.raises(ValueError, match="manifest") as caught:
        open_corpus(corpus.folder)
    sentences = str(caught.value).splitlines()
    assert len(sentences) == 4
    assert f"{truncated} has {len(raw) - 100} bytes, but the manifest says {len(raw)}" in sentences[0]
    assert f"{missing} is missing; restore it" in sentences[1]
    assert f"{emptied} is not as it was written: its hash differs; restore it" in sentences[2]
    assert f"{grown} has {grown.stat().st_size} bytes, but the manifest says" in sentences[3]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda values: values.update(format="another 7"), 'unknown format "another 7"'),
        (lambda values: values.pop("format"), "format"),
        (lambda values: values.pop("bos_id"), "bos_id"),
        (lambda values: values.pop("train"), "train"),
        (lambda values: values.update(surplus=1), "surplus"),
        (lambda values: values["train"]["shards"][0].pop("records"), "records"),
    ],
)
def test_invalid_manifest(tmp_path, source, change, sentence):
    corpus = _build(tmp_path, source)
    _edit_manifest(corpus, change)
    with pytest.raises(ValueError, match=f'is not a manifest of "zaya_jax corpus 2": .*{sentence}'):
        open_corpus(corpus.folder)


def test_half_a_manifest(tmp_path, source):
    corpus = _build(tmp_path, source)
    path = corpus.folder / "manifest.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(ValueError, match="is not a manifest of"):
        open_corpus(corpus.folder)


def test_manifest_that_lost_a_shard(tmp_path, source):
    corpus = _build(tmp_path, source, shard_tokens=64)
    _edit_manifest(corpus, lambda values: values["train"]["shards"].pop())
    with pytest.raises(ValueError, match=r"manifest\.json counts .* blocks of 64 for .* tokens; rebuild"):
        open_corpus(corpus.folder)


def test_unknown_split(tmp_path, source):
    with pytest.raises(ValueError, match='unknown split "test"; it must be "train" or "validation"'):
        _build(tmp_path, source).split("test")


def _write_many(root):
    root.mkdir()
    for i in range(200):  # enough for the default share of 5% to hold some out
        (root / str(i)).write_text(f"text {i}")
    return root


def test_ensure_builds_once_and_then_opens(tmp_path):
    root = _write_many(tmp_path / "many")
    config = DataConfig(corpus=str(tmp_path / "corpora" / "many"), source=str(root))
    built = ensure_corpus(config)
    (root / "later").write_text("not looked at")
    assert ensure_corpus(config) == built
    assert built.train.documents + built.validation.documents == 200


def test_ensure_opens_what_another_process_built_meanwhile(tmp_path, monkeypatch):
    root = _write_many(tmp_path / "many")
    config = DataConfig(corpus=str(tmp_path / "corpus"), source=str(root))
    write_manifest = corpus_module.write_manifest

    def write_after_another(corpus):
        monkeypatch.setattr(corpus_module, "write_manifest", write_manifest)
        build_corpus(config.corpus, source=str(root), tokenizer=TOKENIZER, block_tokens=32)
        write_manifest(corpus)

    monkeypatch.setattr(corpus_module, "write_manifest", write_after_another)
    assert ensure_corpus(config).block_tokens == 32
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus", "many"]


def test_ensure_without_a_source(tmp_path):
    config = DataConfig(corpus=str(tmp_path / "corpus"))
    with pytest.raises(
        ValueError, match=r"TEXTS creates one, or let the run build it with --config\.data\.source=TEXTS$"
    ):
        ensure_corpus(config)
    assert list(tmp_path.iterdir()) == []


def test_ensure_with_another_tokenizer(tmp_path, source):
    """The content matters, not the name: a tokenizer.json may be moved, and another one put in its place."""
    corpus = _build(tmp_path, source)
    config = DataConfig(corpus=str(corpus.folder))
    _edit_manifest(corpus, lambda values: values.update(tokenizer="t.json"))
    assert ensure_corpus(config).tokenizer == "t.json"
    _edit_manifest(corpus, lambda values: values.update(tokenizer_fingerprint="f"))
    with pytest.raises(ValueError, match=r'data\.tokenizer is "byte", but the corpus .* made with "t\.json"'):
        ensure_corpus(config)
    _edit_manifest(corpus, lambda values: values.update(tokenizer="byte"))
    with pytest.raises(ValueError, match=r"data\.tokenizer is .* they must be the same"):
        ensure_corpus(config)


def test_main_prints_bits_per_byte(tmp_path, source, capsys):
    options = ["--pattern", "*.txt", "--validation-percent", "30", "--block-tokens", "64"]
    main(["build", str(tmp_path / "corpus"), "--source", str(source), *options])
    corpus = open_corpus(tmp_path / "corpus")
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "validation" in line]
    split = corpus.validation
    assert row[:5] == ["validation", str(split.documents), "0", f"{split.text_bytes:,}", f"{split.tokens:,}"]
    assert float(row[5]) == pytest.approx(8 * split.gzip_9_bytes / split.text_bytes, abs=1e-3)
    assert float(row[6]) == pytest.approx(8 * split.xz_9_bytes / split.text_bytes, abs=1e-3)


def test_excluded_parts_of_the_standard_library(tmp_path, source, monkeypatch):
    for folder in ("test", "folder0/tests", "site-packages/numpy", "dist-packages", "folder1/__pycache__"):
        (source / folder).mkdir(parents=True)
        (source / folder / "left_out.txt").write_text("not of the library")
    (source / "test.txt").write_text("of the library")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(source)})
    corpus = _build(tmp_path, "stdlib", pattern="*.txt")
    documents = _read_documents(corpus, "train") + _read_documents(corpus, "validation")
    assert len(documents) == 51
    assert "of the library" in documents
    assert "not of the library" not in documents


def test_standard_library(tmp_path):
    """The corpus of configs/tiny.py: real text, without tests and installed packages."""
    corpus = build_corpus(tmp_path / "stdlib", tokenizer=TOKENIZER)
    assert corpus.train.text_bytes + corpus.validation.text_bytes > 5_000_000
    assert corpus.validation.text_bytes > 100_000
    documents = _read_documents(corpus, "train") + _read_documents(corpus, "validation")
    assert pathlib.Path(re.__file__).read_text(encoding="utf-8") in documents
    assert pathlib.Path(np.__file__).read_text(encoding="utf-8") not in documents


def _left_out(corpus):
    lines = (corpus.folder / "left_out.jsonl").read_text().splitlines()
    return {line["path"]: (line["reason"], line["byte"]) for line in map(json.loads, lines)}


@pytest.mark.timeout(20)
def test_hostile_entries_of_a_source_are_listed_and_not_read(tmp_path, source, capsys):
    """A pipe would block, /dev/zero has no end, and the links form a cycle."""
    texts = _read_texts(source)
    os.mkfifo(source / "pipe")
    with socket.socket(socket.AF_UNIX) as unix, contextlib.chdir(source):
        unix.bind("socket")
    (source / "device").symlink_to("/dev/zero")
    (source / "folder0" / "circle").symlink_to(source)
    (source / "nothing").symlink_to("nowhere")
    (source / "itself").symlink_to("itself")
    (source / "latin").write_bytes(b"a caf\xe9")
    odd = [b"a\nb", b"\x1b[31mred", b"[red]", b"\xff\xfe", b"-rf", b"%s", "\u202ex".encode()]
    for name in odd:
        (source / os.fsdecode(name)).touch()
    (source / "one more").symlink_to(source / "folder0" / "0.txt")  # a link to a file, which is read
    main(["build", str(tmp_path / "corpus"), "--source", str(source), "--validation-percent", "30"])
    corpus = open_corpus(tmp_path / "corpus")
    first = (source / "folder0" / "0.txt").read_bytes().decode()
    documents = _read_documents(corpus, "train") + _read_documents(corpus, "validation")
    assert sorted(documents) == sorted([*texts, first])
    named = {
        "pipe": ("a pipe", None),
        "socket": ("a socket", None),
        "device": ("a device", None),
        "folder0/circle": ("a link to a folder", None),
        "nothing": ("a link to nothing", None),
        "itself": ("a link to nothing", None),
        "latin": ("not UTF-8", 5),
    }
    assert _left_out(corpus) == named | {os.fsdecode(name): ("empty", None) for name in odd}
    out = capsys.readouterr().out
    assert out.endswith(f"all of them: {tmp_path}/corpus/left_out.jsonl\n")
    assert "skipped, not UTF-8: latin (byte 5)\n" in out
    assert "skipped, a link to a folder: folder0/circle\n" in out
    assert "\x1b" not in out


def test_a_file_that_cannot_be_read_is_named(tmp_path, source):
    """An unreadable file is an error and not skipped: a failing disk would leave a gap."""
    (source / "memory").symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match="Input/output error") as error:
        _build(tmp_path, source)
    assert error.value.filename == str(source / "memory")
    assert not (tmp_path / "corpus").exists()


def test_a_run_that_builds_its_corpus_lists_skipped_files(tmp_path, capsys):
    root = _write_many(tmp_path / "many")
    (root / "latin").write_bytes(b"\xe9")
    ensure_corpus(DataConfig(corpus=str(tmp_path / "corpus"), source=str(root)))
    assert capsys.readouterr().out == "skipped, not UTF-8: latin (byte 0)\n"

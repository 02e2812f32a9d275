"""Streams of data sets: `datasets` itself reads a local folder in the place of the hub."""

import json
import sys
import types

import datasets
import huggingface_hub
import pytest

from zaya_jax import cli
from zaya_jax.data.corpora.shards import open_corpus
from zaya_jax.data.sources.hub_stream import HubStream
from zaya_jax.data.sources.skipped import Skipped

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEXTS = [f"text {number}: é {'x' * number}\n" for number in range(40)]


@pytest.fixture(name="calls")
def fixture_calls(tmp_path, monkeypatch):
    """Redirects the hub to a folder with two splits, and records what is requested."""
    folder = tmp_path / "hub"
    folder.mkdir()
    for name, rows in {
        "train": [{"text": text, "id": number} for number, text in enumerate(TEXTS)],
        "test": [{"text": "held out", "id": 0}, {"text": None, "id": 1}, {"text": "end", "id": 2}],
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    calls, load = [], datasets.load_dataset

    def load_locally(name, subset, *, revision, **options):
        calls.append((name, subset, revision, options))
        files = {split: str(folder / f"{split}.jsonl") for split in ("train", "test")}
        return load("json", data_files=files, cache_dir=str(tmp_path / "cache"), **options)

    monkeypatch.setattr(datasets, "load_dataset", load_locally)
    api = types.SimpleNamespace(repo_info=lambda *_, **__: types.SimpleNamespace(sha=COMMIT))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    monkeypatch.chdir(tmp_path)
    return calls


def test_a_corpus_is_built_from_a_stream(calls, capsys):
    cli.main(["data", "build", "streamed", "--source", "org/name@main", "--stream"])
    cli.main(["data", "build", "read", "--source", "hub/train.jsonl"])
    streamed, read = open_corpus("streamed"), open_corpus("read")
    assert streamed.source == f'data set org/name at revision {COMMIT}, split train, field "text"'
    # The same texts in the same order are the same corpus.
    assert (streamed.train, streamed.validation) == (read.train, read.validation)
    assert calls == [("org/name", None, COMMIT, {"split": "train", "streaming": True})]


def test_some_rows_of_a_split(calls):
    stream = HubStream(source="org/name", subset="small", split="test", max_documents=2)
    source = stream.open()
    first, second = source
    assert (first.raw, first.record, first.path) == (b"held out", 1, "test")
    assert second.skipped == Skipped("test", 'the field "text" is no text', record=2)
    # A second pass starts again.
    assert next(iter(source)) == first
    assert calls[0][1] == "small"
    assert "subset small, split test, first 2 documents" in source.description


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--source hub/train.jsonl --stream",
            "--stream reads a data set of the Hugging Face hub, and --source is",
        ),
        ("--source org/name --split test", "--split needs --stream"),
        ("--source org/name --stream --pattern *", "--pattern selects files"),
        ("--source org/name --stream --max-documents 0", "--max-documents"),
        ("--source org/name --stream --field body", 'has no column "body"; it has "text", "id"'),
        ("--source org/name --stream --split dev", "cannot be streamed: "),
        ("--source org/name --stream --split test", "--on-bad skip skips records"),
    ],
)
@pytest.mark.usefixtures("calls")
def test_refused_streams(words, sentence, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["data", "build", "out", *words.split()])
    assert sentence in capsys.readouterr().err


@pytest.mark.usefixtures("calls")
def test_without_datasets_the_error_names_the_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["data", "build", "out", "--source", "org/name", "--stream"])
    assert "--stream needs datasets, which is not installed: " in capsys.readouterr().err

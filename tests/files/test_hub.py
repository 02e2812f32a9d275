"""Hub ids instead of folders: huggingface_hub downloads them, or an error names the command for it."""

import json
import os
import pathlib
import sys
import types

import pytest

from zaya_jax import cli
from zaya_jax.convert.pytorch.folder import open_folder
from zaya_jax.data.chats.records import read_chats
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.sources.text_sources import open_source
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer
from zaya_jax.files.hub import fetch, is_hub_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A fake huggingface_hub with one repository, which records its requests."""

    def __init__(self, cache: pathlib.Path, files: dict[str, str]):
        self.calls: list[dict] = []
        self._cache, self._files = cache, files

    def snapshot_download(self, **arguments) -> str:
        self.calls.append(arguments)
        if arguments["repo_id"] != "org/name":
            raise RuntimeError(f"404 Client Error: {arguments['repo_id']} is not there\nRequest ID: x")
        # Like the real package: links from a snapshot to blobs.
        repository = self._cache / f"{arguments['repo_type']}s--org--name"
        snapshot, blobs = repository / "snapshots" / COMMIT, repository / "blobs"
        for number, (name, content) in enumerate(self._files.items()):
            blobs.mkdir(parents=True, exist_ok=True)
            (blobs / f"{number}").write_text(content)
            place = snapshot / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.is_symlink():
                place.symlink_to(os.path.relpath(blobs / f"{number}", place.parent))
        return str(snapshot)


@pytest.fixture(name="hub")
def fixture_hub(tmp_path, monkeypatch):
    """Replaces the package by a fake hub with some files, in an empty working folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def install(files: dict[str, str]) -> Hub:
        hub = Hub(tmp_path / "cache", files)
        module = types.ModuleType("huggingface_hub")
        module.snapshot_download = hub.snapshot_download  # type: ignore
        monkeypatch.setitem(sys.modules, "huggingface_hub", module)
        return hub

    return install


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("Zyphra/ZAYA1-8B", True),
        ("org/name@main", True),
        ("org/name@refs/pr/1", True),
        ("runs/tiny", False),  # the folder exists, but has no "tiny": a typo must not be sent to the network
        ("runs", False),
        ("nowhere", False),
        ("a/b/c", False),
        ("/org/name", False),
        ("../org", False),
        ("./org/name", False),
        ("~/name", False),
        ("gs://bucket/run", False),
    ],
)
def test_which_names_are_ids(tmp_path, monkeypatch, name, is_id):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert is_hub_id(name) == is_id


def test_a_data_set_is_downloaded_and_its_revision_recorded(hub, capsys):
    fake = hub({"data/train.jsonl": '{"text": "one"}\n{"text": "two"}\n', "README.md": "a card"})
    source = open_source("org/name", pattern="*.jsonl")
    assert [each.raw for each in source] == [b"one", b"two"]
    assert fake.calls == [
        {
            "repo_id": "org/name", "repo_type": "dataset", "revision": None,
            "allow_patterns": ["*.jsonl", "*/*.jsonl"],
        }
    ]  # fmt: skip
    corpus = build_corpus("corpus", source=source, tokenizer=ByteTokenizer(), validation_percent=50)
    assert f"org/name at revision {COMMIT}" in corpus.source
    assert "downloading the data set org/name" in capsys.readouterr().err


def test_a_revision_is_requested(hub):
    fake = hub({"a.jsonl": '{"text": "one"}\n'})
    open_source("org/name@v1.0", pattern="*.jsonl")
    assert (fake.calls[0]["repo_id"], fake.calls[0]["revision"]) == ("org/name", "v1.0")


def test_chats_of_a_data_set(hub, capsys):
    chat = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}
    hub({"train.jsonl": json.dumps(chat) + "\n" + json.dumps(chat | {"system": "s"}) + "\n"})
    assert len(list(read_chats("org/name"))) == 2
    cli.main(["data", "chats", "corpus", "--source", "org/name", "--sequence-length", "64"])
    assert "records are read as --format sharegpt" in capsys.readouterr().out
    assert COMMIT in json.loads(pathlib.Path("corpus/manifest.json").read_text())["source"]


def test_a_failed_download_is_one_sentence(hub):
    hub({})
    with pytest.raises(
        ValueError, match=r"^the model org/other cannot be downloaded from the hub: 404 .*there$"
    ):
        fetch("org/other", "model")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("convert Zyphra/ZAYA1-8B out", "run `hf download Zyphra/ZAYA1-8B --local-dir ZAYA1-8B`"),
        ("convert inspect org/name", "run `hf download org/name --local-dir name`"),
        (
            "data build out --source org/texts",
            "`hf download org/texts --repo-type dataset --local-dir texts`",
        ),
        ("data chats out --sequence-length 9 --source org/c", "`hf download org/c --repo-type dataset"),
        ("data preferences out --sequence-length 9 --source org/c", "`hf download org/c --repo-type dataset"),
    ],
)
def test_without_the_package_the_command_is_named(hub, monkeypatch, capsys, command, sentence):
    hub({})
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # simulates a package that is not installed
    with pytest.raises(SystemExit) as leaving:
        cli.main(command.split())
    assert leaving.value.code == 2
    assert sentence in (err := capsys.readouterr().err)
    assert err.count("\n") == 1


def test_a_typo_of_a_folder_is_not_sent_to_the_hub(hub, capsys):
    fake = hub({})
    pathlib.Path("runs").mkdir()
    with pytest.raises(SystemExit):
        cli.main(["convert", "runs/tyni", "out"])
    assert "runs/tyni does not exist" in capsys.readouterr().err
    assert fake.calls == []


def test_a_model_of_the_hub(hub):
    hub({"config.json": "{}", "model.safetensors": "version https://git-lfs.github.com/spec/v1\n"})
    with pytest.raises(ValueError, match=rf"snapshots/{COMMIT}/model.safetensors .* Git LFS pointer"):
        open_folder("org/name")

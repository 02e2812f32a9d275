"""`zaya convert --push`: the calls of huggingface_hub, with a fake of its API instead of the network."""

import inspect
import pathlib
import sys
import types

import pytest
from huggingface_hub import HfApi
from small_weights import plausible_variables, small_config, zaya

import zaya_jax

SIGNATURES = {name: inspect.signature(getattr(HfApi, name)) for name in ("create_repo", "upload_folder")}


class FakeApi:
    """Records calls, and checks them against the signatures of the real class."""

    def __init__(self):
        self.calls, self.files, self.fails = [], {}, False

    def create_repo(self, *arguments, **options):
        self._check("create_repo", arguments, options)

    def upload_folder(self, **options):
        self._check("upload_folder", (), options)
        folder = pathlib.Path(options["folder_path"])
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        return types.SimpleNamespace(commit_url="https://hub/me/tiny/commit/1")

    def _check(self, name, arguments, options):
        SIGNATURES[name].bind(self, *arguments, **options)
        self.calls.append((name, *arguments, options))
        if self.fails:
            raise RuntimeError("401 Client Error\nRequest ID: x")


@pytest.fixture(name="api")
def fixture_api(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    api = FakeApi()
    # The class itself stays: transformers, with which `--verify` compares, imports it.
    for name, method in (("create_repo", api.create_repo), ("upload_folder", api.upload_folder)):
        monkeypatch.setattr(HfApi, name, lambda _, *each, call=method, **options: call(*each, **options))
    config = small_config()
    zaya_jax.save_pytorch("source", zaya_jax.Zaya(config), plausible_variables(config, 0))
    return api


def test_a_folder_is_pushed_when_it_is_complete(api, capsys):
    zaya("convert source out --layout legacy --license mit --push me/tiny --private")
    assert api.calls == [
        ("create_repo", "me/tiny", {"exist_ok": True, "private": True}),
        (
            "upload_folder",
            {"repo_id": "me/tiny", "folder_path": "out", "commit_message": "Weights, legacy layout",
             "repo_type": "model"},
        ),
    ]  # fmt: skip
    assert api.files == {path.name: path.read_bytes() for path in pathlib.Path("out").iterdir()}
    assert b'license: "mit"' in api.files["README.md"]
    assert "pushed: https://hub/me/tiny/commit/1" in capsys.readouterr().out


def test_an_existing_folder_is_verified_and_pushed(api, capsys):
    zaya("convert source out --layout native")
    zaya("convert source out --layout native --overwrite --push me/tiny")
    assert "note: the model card has no license" in capsys.readouterr().out
    zaya("convert source out --layout native --push me/tiny")
    out = capsys.readouterr().out
    assert out.index("verified: all") < out.index("pushed: ")
    card = pathlib.Path("out/README.md")
    card.write_bytes(card.read_bytes() + b"x")
    api.calls.clear()
    with pytest.raises(SystemExit):
        zaya("convert source out --layout native --push me/tiny")
    assert [call[0] for call in api.calls] == ["create_repo"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--push me/tiny", "--push uploads a PyTorch folder; add --layout native or legacy"),
        ("--layout native --private", "--private needs --push"),
        ("--layout native --push tiny", '--push is "tiny"; it must be the id of a repository'),
        ("--layout native --push me/tiny@main", "it must be the id of a repository"),
    ],
)
def test_refused_options(api, words, sentence, capsys):
    with pytest.raises(SystemExit, match="2"):
        zaya(f"convert source out {words}")
    assert sentence in capsys.readouterr().err
    assert not api.calls
    assert not pathlib.Path("out").exists()


def test_other_folders_are_not_published(api, capsys):
    zaya("convert source out --layout zaya")
    with pytest.raises(SystemExit, match="2"):
        zaya("convert source out --layout native --push me/tiny")
    assert "cannot be verified before the upload" in capsys.readouterr().err
    assert not api.calls


def test_a_missing_token_is_found_before_the_work(api, capsys):
    api.fails = True
    with pytest.raises(SystemExit, match="2"):
        zaya("convert source out --layout native --push me/tiny")
    sentence = "cannot be pushed to the hub: 401 Client Error; `hf auth login` stores a token"
    assert sentence in capsys.readouterr().err
    assert not pathlib.Path("out").exists()


@pytest.mark.usefixtures("api")
def test_without_the_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SystemExit, match="2"):
        zaya("convert source out --layout native --push me/tiny")
    assert "--push needs huggingface_hub, which is not installed: " in capsys.readouterr().err

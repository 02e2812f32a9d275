"""Every option and config field with a path refuses URLs."""

import importlib

import pytest

from zaya_jax import cli
from zaya_jax.commands.registry import COMMANDS
from zaya_jax.completion.words import UNLISTED
from zaya_jax.config import Config
from zaya_jax.errors import UserError
from zaya_jax.options import load_config, parser_of

URLS = (
    "gs://bucket/run",
    "s3://bucket/run",
    "hdfs:///run",
    "file:///tmp/run",
    "https://host/run",
    "GS://b/r",
)
FIELDS = ("run_folder", "data.corpus", "data.source", "data.tokenizer", "train.init_from", "tasks.folder")
PATH_OPTIONS = (
    "generate RUN --prompt=x",
    "generate runs/x --output=URL --input=prompts.jsonl",
    "generate runs/x --input URL --output=out.jsonl",
    "chat RUN",
    "think RUN --prompt=x",
    "serve RUN",
    "serve runs/x --api-key-file=URL",
    "eval runs/x --text a.txt URL",
    "eval runs/x --text a.txt --json=URL",
    "eval runs/x --tasks=arc --task-folder=URL",
    "data build URL",
    "data build corpora/x --source=URL",
    "data build corpora/x --tokenizer=URL",
    "data chats corpora/x --sequence-length=64 --source URL",
    "data preferences corpora/x --sequence-length=64 --source=x --template=URL",
    "data verify URL",
    "data inspect URL",
    "tokenizer train URL --vocab-size=300",
    "tokenizer train x --source=URL --vocab-size=300",
    "convert URL out --layout=native",
    "convert runs/x URL --layout=native",
    "convert inspect URL",
    "ckpt ls URL",
    "ckpt diff runs/a URL:100",
    "ckpt reshape runs/x URL --nodes=1",
    "aegis status URL",
    "aegis metrics runs/x URL",
    "aegis timeline runs/x --output=URL",
    "report runs/x --output=URL",
    "report runs/x URL",
    "plan --config=URL",
    "plan --json=URL",
    "doctor --json=URL",
    "bench storage --folder=URL",
    "train --config=URL",
)


def sentence_of(command: str, capsys: pytest.CaptureFixture) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(command.split())
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", PATH_OPTIONS)
def test_a_url_in_an_option_is_refused(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = command.replace("RUN ", "URL ").removesuffix("RUN") + ("URL" if command.endswith("RUN") else "")
    error = sentence_of(words.replace("URL", "gs://bucket/run"), capsys)
    assert "is gs://bucket/run" in error
    assert "a URL; it must be a path on this machine" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("field", FIELDS)
def test_a_url_in_a_config_field_is_refused(field, url):
    with pytest.raises(UserError, match=rf"^{field} is \S+, a URL"):
        load_config("configs/tiny.py", [f"--config.{field}={url}"])


@pytest.mark.parametrize("command", ["train", "supervise -- train", "plan"])
def test_nothing_is_written_for_a_run_folder_that_is_a_url(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = sentence_of(f"{command} --config.run_folder=gs://bucket/run", capsys)
    assert "run_folder is gs://bucket/run, a URL" in error
    assert not list(tmp_path.iterdir())


def test_a_mixture_of_urls_is_refused():
    mixture = {"name": "both", "corpora": ("corpora/a", "s3://b/c"), "weights": (1.0, 1.0)}
    with pytest.raises(UserError, match=r"^data\.mixtures\.both\.corpora is s3://b/c, a URL"):
        Config.from_dict({"data": {"mixtures": (mixture,)}})


@pytest.mark.parametrize("path", ["gs:/bucket", "a:b", "runs/a b", "C:\\runs", "./x://y", "runs/http://x"])
def test_odd_local_paths_stay_paths(path):
    assert Config(run_folder=path).run_folder == path


def test_texts_may_be_urls():
    parser = parser_of(importlib.import_module(COMMANDS["generate"][0]).main)
    options = parser.parse_args(["runs/x", "--prompt=https://example.com/a", "--stop", "https://"])
    assert options.prompt == "https://example.com/a"


def test_every_option_whose_help_names_a_file_or_a_folder_is_checked():
    words = ("a file", "the file", "a folder", "the folder", "the path")
    unchecked = []
    for command, (module, _) in COMMANDS.items():
        main = importlib.import_module(module).main
        outer = parser_of(main)
        choices = [str(c) for a in outer.actions if not a.option_strings for c in a.choices or ()]
        for parser in (outer, *(parser_of(main, word) for word in (*choices, *UNLISTED.get(command, ())))):
            for action in parser.actions:
                about = parser.help_of(action)
                if action.nargs == 0 or action.choices or not any(about.startswith(w) for w in words):
                    continue
                try:
                    parser._get_value(action, "gs://bucket/run")
                except UserError:
                    continue
                unchecked.append((parser.prog, action.option_strings or action.dest))
    assert not unchecked

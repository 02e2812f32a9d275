"""Weights & Biases and trackio: each step is sent once, a resumed run continues there, and a tracker that
fails does not end the run."""

import importlib.util
import json
import pathlib
import sqlite3
import struct
import sys
import types

import pytest
from small_runs import build_small_corpus, small_values
from tensorboard_reader import events_in, records
from tensorboardX.proto.event_pb2 import Event

from zaya_jax import cli
from zaya_jax.config import Config
from zaya_jax.platform.shell import install_command
from zaya_jax.run_folder.names import TRACKERS_FILE
from zaya_jax.train.hooks.trackers import Trackers, open_trackers
from zaya_jax.train.metrics import tensorboard_events
from zaya_jax.train.metrics.files import MetricsWriter
from zaya_jax.train.trainer import train

SAMPLE_LETTERS = 8


class FakePackage(types.ModuleType):
    """Records calls of wandb and trackio, with the parts of their interfaces that we use."""

    def __init__(self, name: str):
        super().__init__(name)
        self.begun, self.rows, self.texts, self.ends = [], [], [], []
        self.fails_at = None
        self.__spec__ = importlib.util.spec_from_loader(name, None)

    def init(self, **settings):
        self.begun.append(settings)
        return self

    def log(self, values, step=None):
        if step == self.fails_at:
            raise ConnectionError("the server is gone\nand more of it")
        self.rows.append((step, values))

    def finish(self, **how):
        self.ends.append(how)

    def Settings(self, **settings):
        return settings

    def Table(self, *, columns, data):
        return [dict(zip(columns, row, strict=True)) for row in data]

    def Markdown(self, text):
        return text


@pytest.fixture
def packages(monkeypatch):
    actual = {name: FakePackage(name) for name in ("wandb", "trackio")}
    for name, package in actual.items():
        monkeypatch.setitem(sys.modules, name, package)
    return actual


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return build_small_corpus(tmp_path_factory.mktemp("corpora") / "corpus")


def config_of(folder, corpus="corpus", **fields) -> Config:
    values = small_values(run_folder=str(folder), corpus=str(corpus))
    values["train"] |= {"num_steps": 6, "eval_every": 3, "checkpoint_every": 3} | fields.pop("train", {})
    values["optimizer"]["warmup_steps"] = 2
    return Config.from_dict(values | {"log": {"wandb": "online", "trackio": True} | fields})


def test_both_trackers_receive_all_rows_of_the_metrics_file(packages, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_of(
        tmp_path / "run", corpus.folder, project="ours", train={"sample_tokens": SAMPLE_LETTERS}
    )
    (tmp_path / "config.json").write_text(config.to_text())
    cli.main(["train", "--config=config.json"])
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    sample = json.loads((tmp_path / "run/samples.jsonl").read_text())["text"]
    expected = [
        (line["step"], {f"{line['kind']}/{k}": v for k, v in line.items() if k not in ("step", "kind")})
        for line in lines
    ]
    run_ids = json.loads((tmp_path / "run" / TRACKERS_FILE).read_text())
    (begun,), (other,) = packages["wandb"].begun, packages["trackio"].begun
    for name, package in packages.items():
        assert package.rows[:-1] == expected
        assert package.begun[0]["config"]["model"]["hidden_size"] == config.model.hidden_size
        assert package.begun[0]["project"] == "ours"
        assert run_ids[name]["step"] == 6
    assert packages["wandb"].rows[-1] == (6, {"sample": [{"step": 6, "text": sample}]})
    assert packages["trackio"].rows[-1][1]["sample"].replace("    ", "").strip() == sample.strip()
    assert (begun["id"], begun["name"]) == (run_ids["wandb"]["run_id"], "run")
    assert other["name"] == f"run-{run_ids['trackio']['run_id']}"
    assert (packages["wandb"].ends, packages["trackio"].ends) == ([{"exit_code": 0}], [{}])
    shown = texts(tmp_path / "run/tensorboard")
    assert [tag for tag, _ in shown] == ["config", "sample"]
    assert json.loads(shown[0][1]) == json.loads(config.to_text())


def texts(folder):
    """Returns tags and texts in the order of TensorBoard's files, without the indent of code blocks."""
    events_of = (event for file in sorted(folder.iterdir()) for event in records(file))
    values = (value for event in events_of for value in event.summary.value)
    actual = [value for value in values if value.metadata.plugin_data.plugin_name == "text"]
    return [(value.tag, value.tensor.string_val[0].decode().replace("\n    ", "\n")) for value in actual]


def test_a_text_is_a_record_of_protobuf():
    expected = Event(wall_time=1.5, step=7, summary={"value": [{"tag": "é"}]})
    value = expected.summary.value[0]
    value.metadata.plugin_data.plugin_name = "text"
    value.tensor.dtype = 7
    value.tensor.tensor_shape.SetInParent()
    value.tensor.string_val.append("東京\n".encode())
    (actual,) = events_in(tensorboard_events.text(1.5, 7, "é", "東京\n"))
    assert actual == expected


def attempts(packages, folder, *begins):
    """Sends steps like attempts of a run, each of which resumes after `first` and is killed."""
    for first, last in begins:
        trackers = Trackers(config_of(folder))
        trackers.start()
        with MetricsWriter(folder, first_step=first) as writer:
            for step in range(first + 1, last + 1):
                writer.write(step, "train", {"loss": float(step)})
                trackers.write(step, "train", {"loss": float(step)})
                if step % 5 == 0:
                    writer.write(step, "validation", {"loss": 0.0})
                    trackers.write(step, "validation", {"loss": 0.0})
                    trackers.sync()
    return {name: [(step, next(iter(row))) for step, row in p.rows] for name, p in packages.items()}


def test_attempts_continue_one_run_and_no_step_is_sent_twice(packages, tmp_path):
    """The third attempt has no rows of the steps that the first one sent, but remembers them."""
    printed = attempts(packages, tmp_path, (0, 8), (5, 6), (5, 12))
    expected = [(step, "train/loss") for step in range(1, 13)]
    for step in (5, 10):
        expected.insert(expected.index((step, "train/loss")) + 1, (step, "validation/loss"))
    assert printed == {"wandb": expected, "trackio": expected}
    assert len({begun["id"] for begun in packages["wandb"].begun}) == 1
    assert len({begun["name"] for begun in packages["trackio"].begun}) == 1


def test_a_rollback_sends_no_step_twice(packages, tmp_path):
    trackers = Trackers(config_of(tmp_path))
    for first in (0, 2):  # in one process
        trackers.start()
        for step in range(first + 1, first + 5):
            trackers.write(step, "train", {"loss": float(step)})
    assert [step for step, _ in packages["wandb"].rows] == [1, 2, 3, 4, 5, 6]
    assert len(packages["wandb"].begun) == 1


def test_a_failing_tracker_is_reported_once_and_disabled(packages, corpus, tmp_path, capsys):
    packages["wandb"].fails_at = 2
    config = config_of(tmp_path / "run", corpus.folder)
    assert train(config).config == config
    output = capsys.readouterr().err
    assert output.count("wandb fails and is disabled (ConnectionError: the server is gone); ") == 1
    assert [step for step, _ in packages["wandb"].rows] == [1]
    assert packages["trackio"].rows[-1][0] == 6


def test_a_tracker_that_cannot_start_or_close_does_not_end_the_run(packages, tmp_path, monkeypatch, capsys):
    def refuse(**_):
        raise OSError("no network")

    monkeypatch.setattr(packages["wandb"], "init", refuse)
    monkeypatch.setattr(packages["trackio"], "finish", refuse)
    with open_trackers(config_of(tmp_path)) as trackers:
        trackers.start()
        trackers.write(1, "train", {"loss": 1.0})
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["wandb", "trackio"]
    assert [step for step, _ in packages["trackio"].rows] == [1]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_package_is_a_user_error(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    only = {"wandb": "offline" if name == "wandb" else "off", "trackio": name == "trackio"}
    (tmp_path / "config.json").write_text(config_of(tmp_path / "run", **only).to_text())
    with pytest.raises(SystemExit):
        cli.main(["train", f"--config={tmp_path}/config.json"])
    assert f"the package {name} is not installed: {install_command(name)}" in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.json").exists()


def test_other_processes_send_nothing(packages, tmp_path, monkeypatch):
    monkeypatch.setattr("zaya_jax.parallel.processes.hosts.is_first", lambda: False)
    trackers = Trackers(config_of(tmp_path))
    trackers.start()
    trackers.write(1, "train", {"loss": 1.0})
    trackers.close()
    assert not packages["wandb"].begun
    assert not list(tmp_path.iterdir())


def two_attempts(config):
    """Sends two attempts of a run; the second resumes from a checkpoint of the first."""
    for first, last in ((0, 6), (4, 9)):
        with open_trackers(config) as trackers:
            trackers.start()
            for step in range(first + 1, last + 1):
                trackers.write(step, "train", {"loss": step + 0.5})
            if last == 9:
                trackers.text(9, "sample", "def main():\n  pass")


def records_of(file):
    """Yields the records of a .wandb file: a LevelDB log of 32 KiB blocks after seven bytes of wandb."""
    data, place, parts = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        if 0x8000 - place % 0x8000 < 7 or kind == 0:  # the rest of a block is too short for a record
            place += 0x8000 - place % 0x8000
            continue
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def test_the_real_wandb_writes_files_of_one_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_SILENT", "true")
    two_attempts(config_of(tmp_path, wandb="offline", trackio=False))
    losses, run_ids, keys = [], set(), set()
    for file in sorted(pathlib.Path(tmp_path).glob("wandb/offline-run-*/*.wandb")):
        for record in map(Record.FromString, records_of(file)):
            if record.HasField("run"):
                run_ids.add(record.run.run_id)
                keys |= {each.key for each in record.run.config.update}
            values = {".".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            if "train/loss" in values:
                losses.append((record.history.step.num, float(values["train/loss"])))
    assert losses == [(step, step + 0.5) for step in range(1, 10)]
    assert run_ids == {json.loads((tmp_path / TRACKERS_FILE).read_text())["wandb"]["run_id"]}
    assert {"model", "optimizer", "run_folder"} <= keys


def test_the_real_trackio_has_rows_of_one_run(tmp_path, monkeypatch):
    trackio = pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage, trackio):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "kept", raising=False)
    two_attempts(config_of(tmp_path, wandb="off"))
    with sqlite3.connect(tmp_path / "kept/zaya_jax.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    losses = [(step, json.loads(values)["train/loss"]) for _, step, values in rows if b"train/loss" in values]
    assert losses == [(step, step + 0.5) for step in range(1, 10)]
    assert len({name for name, _, _ in rows}) == 1
    assert b"def main" in rows[-1][2]

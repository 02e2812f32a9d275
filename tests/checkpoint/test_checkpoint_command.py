"""`zaya ckpt`: what its subcommands print and change."""

import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from small_runs import small_config

from zaya_jax import cli
from zaya_jax.checkpoint import Checkpoints, Retention, StepDescription, newest_step
from zaya_jax.checkpoint.format.layout import all_steps
from zaya_jax.commands.checkpoint import SUBCOMMANDS
from zaya_jax.files import durable
from zaya_jax.platform.shell import zaya_command

STEPS = (4, 8, 12, 16)
LOSSES = {4: 2.5, 12: 2.25, 16: 3.125}


def about_of(step: int) -> StepDescription:
    return StepDescription(
        step=step, phase="warm", config={}, corpora={}, versions={}, num_processes=1, num_devices=1,
        written="2026-11-23T01:02:03+00:00",
    )  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """Writes a run with nearly empty checkpoints; the first has no description."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    with Checkpoints(folder, retention=Retention(newest=9)) as checkpoints:
        for step in STEPS:
            weights = {"params": {"a": jax.device_put(np.full((3, 5), step, np.float32))}}
            about = None if step == 4 else about_of(step)
            checkpoints.save(step, weights=weights, training={"step": np.int32(step)}, about=about)
    (folder / "config.json").write_text(small_config(run_folder=folder, corpus=folder).to_text())
    rows = [{"step": step, "kind": "validation", "loss": loss} for step, loss in LOSSES.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def run(saved, tmp_path) -> pathlib.Path:
    return shutil.copytree(saved, tmp_path / "run")


def zaya(*words) -> int:
    """Returns the exit code of `zaya ckpt WORDS`."""
    try:
        cli.main(["ckpt", *map(str, words)])
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def cells(out: str) -> dict[str, list[str]]:
    """Returns the rows of a table by their first cell."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line[:1] == "│"]
    return {row[0]: row[1:] for row in rows}


def flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_ls_shows_each_step_and_the_rules_that_keep_it(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    (run / "checkpoints/8/weights/_METADATA").unlink()
    shutil.copytree(run / "checkpoints/16", run / "checkpoints/20.damaged")
    shutil.rmtree(run / "checkpoints/16/training")
    assert zaya("ls", run) == 0
    out = capsys.readouterr().out
    rows = cells(out)
    assert list(rows) == ["4", "8", "12", "16", "20"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d", rows["4"][0])
    assert rows["4"][2:] == ["", "2.5000", "intact", "nothing"]
    assert rows["8"][2:] == ["", "", "damaged", "nothing"]
    assert rows["12"][0] == "2026-11-23 01:02"
    assert rows["12"][2:] == ["warm", "2.2500", "intact", "newest"]
    assert rows["16"][2:] == ["", "3.1250", "damaged, weights only", "newest"]
    assert rows["20"][2:] == ["", "", "set aside", "20.damaged"]
    assert "step 8 is damaged: weights/_METADATA is missing\n" in out


def test_ls_reads_no_arrays(run, capsys, monkeypatch):
    """It reads descriptions only; damaged arrays are found by `verify`."""
    flip(run / "checkpoints/8/weights/_METADATA")
    flip(run / "checkpoints/12/run.json")
    read, content_hash = set(), durable.content_hash
    monkeypatch.setattr(durable, "content_hash", lambda path: read.add(path.name) or content_hash(path))
    assert zaya("ls", run) == 0
    assert read == {"manifest.json", "run.json"}
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "step 12 is damaged: run.json is not as it was written"


def test_ls_fits_80_columns(run, capsys, monkeypatch):
    """Also if the run has damaged steps."""
    monkeypatch.setenv("COLUMNS", "80")
    (run / "checkpoints/8/weights/_METADATA").unlink()
    shutil.copytree(run / "checkpoints/16", run / "checkpoints/20000.damaged")
    assert zaya("ls", run) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    _, *lines = out.splitlines()  # the first line has the folder of the run, of any length
    assert max(map(len, lines)) <= 80


def test_verify_accepts_intact_steps(run, capsys):
    assert zaya("verify", run) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "a run resumes from step 16"
    assert len(lines) == len(STEPS)
    for step, line in zip(STEPS, lines, strict=True):
        assert re.fullmatch(rf"step {step}: intact \([\d.]+ KiB, [\d.]+ GB/s\)", line)


def test_verify_lists_every_damaged_file(run, capsys):
    files = sorted((run / "checkpoints/16").rglob("_METADATA"))
    for path in files:
        flip(path)
    (run / "checkpoints/16/more").write_text("")
    (run / "checkpoints/12/run.json").unlink()
    assert zaya("verify", run) == 3
    out = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step 16: damaged, 3 of its files \(.*\)", out[4])
    assert out[2].startswith("step 12: damaged, 1 of its files")
    assert out[3] == "  run.json is missing"
    assert out[5] == "  more is not in manifest.json; it was added later"
    assert [line for line in out if "not as" in line] == [
        f"  {path.relative_to(run / 'checkpoints/16')} is not as it was written" for path in files
    ]
    assert out[-1] == f"a run resumes from step {newest_step(run)}" == "a run resumes from step 8"
    assert zaya("verify", run, 4, 8) == 0
    assert "resumes from" not in capsys.readouterr().out  # not all steps were verified


def test_verify_reads_the_hashes_of_converted_runs(run, capsys):
    folder = run / "checkpoints/16"
    (folder / "manifest.json").unlink()
    (folder / "committed").unlink()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {str(path.relative_to(run)): durable.sha256_of_file(path) for path in files}
    durable.write_checksums(run, sums)
    assert zaya("verify", run, 16) == 0
    flip(files[0])
    files[1].unlink()
    flip(files[2])
    capsys.readouterr()
    assert zaya("ls", run) == 0
    names = [str(path.relative_to(folder)) for path in files]
    assert capsys.readouterr().out.endswith(f"step 16 is damaged: {names[1]} is missing\n")
    assert zaya("verify", run, 16) == 3
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"  {names[1]} is missing",
        *(f"  {files[i]} is not as it was written: its checksum differs" for i in (0, 2)),
    ]


def test_prune_removes_steps_that_no_rule_keeps(run, capsys):
    assert zaya("prune", run, "--keep=1", "--keep-best", "--dry-run") == 0
    message = capsys.readouterr().out
    assert all_steps(run) == [4, 8, 12, 16]
    assert zaya("prune", run, "--keep=1", "--keep-best") == 0
    assert capsys.readouterr().out == message.replace("would be removed", "removed")
    assert all_steps(run) == [12, 16]
    assert message.endswith(" KiB would be removed; remaining steps: 12, 16\n")
    assert zaya("prune", run) == 0  # as in the config: the newest two
    assert all_steps(run) == [12, 16]


def test_prune_keeps_the_newest_intact_step(run):
    """Damaged later steps do not count as newest."""
    for step in (12, 16):
        flip(run / f"checkpoints/{step}/weights/_METADATA")
    assert zaya("prune", run, "--keep=1") == 0
    assert all_steps(run) == [8, 12, 16]
    assert newest_step(run) == 8


@pytest.mark.parametrize("command", list(SUBCOMMANDS))
def test_each_subcommand_has_help_with_an_example(command, capsys):
    assert zaya(command, "--help") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: zaya ckpt {command} ")
    assert f"examples:\n  {zaya_command()} ckpt {command} " in out

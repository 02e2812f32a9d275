import pytest

from zaya_jax.bench.training import start
from zaya_jax.bench.training.start import COLD, CPU, SECOND, Starts
from zaya_jax.errors import UserError

TRAIN = """
import os, pathlib, signal, sys, time
if "--help" in sys.argv:
    sys.exit()
resumed = pathlib.Path("state").exists()
if not resumed:
    print("trained tokenizer.json")
    pathlib.Path("state").touch()
print("run runs/tiny on 1 x cpu")
print("step 1/800 | loss 1.0")
time.sleep(60)  # until it is stopped
"""


def checkout(folder, program):
    """Writes a package named zaya_jax whose `zaya train` is another program."""
    (folder / "zaya_jax").mkdir(parents=True)
    (folder / "zaya_jax" / "__init__.py").touch()
    (folder / "zaya_jax" / "cli.py").write_text(program)
    return folder


def test_a_second_start_continues_in_the_folder_of_the_first(tmp_path):
    folder = checkout(tmp_path, TRAIN)
    first, second = start.measure({"this": folder}, 1)
    assert (first.kind, second.kind) == (COLD, SECOND)
    assert set(first.seconds[0]) == {"tokenizer", "compiled", "first step", CPU}
    assert set(second.seconds[0]) == {"compiled", "first step", CPU}
    assert 0 < first.seconds[0]["tokenizer"] <= first.seconds[0]["first step"] < 60


def test_a_start_that_fails_is_reported(tmp_path):
    folder = checkout(tmp_path, TRAIN.replace('print("step', 'sys.exit("no disk") #'))
    with pytest.raises(UserError, match=r"(?s)ended before its first step.*no disk"):
        start.measure({"this": folder}, 1)


def test_a_base_must_be_a_checkout(tmp_path):
    with pytest.raises(UserError, match=r"which has no zaya_jax/cli\.py"):
        start.main(["--base", str(tmp_path)])


def test_the_table_has_medians_and_ratios_of_rounds(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    times = {"base": (20.0, 40.0, 30.0), "this": (10.0, 10.0, 30.0)}
    starts = [
        Starts(name, kind, [{"first step": seconds, CPU: 5.0} for seconds in of_rounds])
        for name, of_rounds in times.items()
        for kind in (COLD, SECOND)
    ]
    start.report(starts)
    out = capsys.readouterr().out
    assert "…" not in out
    (row,) = (line.split() for line in out.splitlines() if "first, base" in line)
    assert "30.00" in row
    assert "first start: 0.50 of the base's time (rounds: 0.50, 0.25, 1.00)" in out

"""`zaya bench checkpoint` with a tiny state: each method in each number of processes, and no file remains."""

import re
import threading
import time

import pytest

from zaya_jax.bench import command
from zaya_jax.bench.storage import checkpoint
from zaya_jax.bench.storage.checkpoint import ORDER, Timed

GIB = 2**-10


@pytest.fixture
def folders_at_once(tmp_path):
    """Records the names of checkpoints on the disk by polling."""
    result, done = [], threading.Event()

    def look():
        while not done.is_set():
            result.append({path.name for path in tmp_path.glob("bench-checkpoint-*/0-*")})
            time.sleep(0.005)

    thread = threading.Thread(target=look)
    thread.start()
    yield result
    done.set()
    thread.join()


@pytest.mark.slow
def test_all_methods_are_timed_and_no_file_remains(tmp_path, monkeypatch, capsys, folders_at_once):
    monkeypatch.setenv("COLUMNS", "80")
    checkpoint.run(rounds=1, gib=GIB, folder=str(tmp_path), processes=(1, 2))
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert [row[:2] for row in rows if len(row) == 5] == [[count, name] for count in "12" for name in ORDER]
    assert all(float(cell) >= 0 for row in rows for cell in row[2:] if cell)
    assert "…" not in out
    assert {"0-Orbax", "0-ours", "0-plain-files"} <= set().union(*folders_at_once)
    assert max(map(len, folders_at_once)) == 1  # the disk needs space for only one of them
    assert list(tmp_path.iterdir()) == []


def test_figures_by_hand(capsys):
    seconds = dict.fromkeys(ORDER, (1.0, 2.0)) | {"ours": (0.5, 3.0)}
    checkpoint.report([Timed(2, 10**9, seconds)], rounds=1)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["2", "ours", "0.500", "3.000", "0.33"] in rows


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["checkpoint", "--gib=0"], "--gib is 0; it must be 0.000976562 or above"),
        (["checkpoint", "--gib=nan"], "--gib is nan; it must be"),
        (["checkpoint", "--gib=1e9"], "--gib is 1e+09; "),
        (["checkpoint", "--folder=none"], '--folder is "none"; it must be a folder'),
        (["checkpoint", "--rounds=0"], "--rounds is 0; it must be at least 1"),
        (["torch", "--gib=2"], "unrecognized arguments: --gib=2"),
    ],
)
def test_invalid_options_of_checkpoint_are_rejected(words, printed):
    with pytest.raises(ValueError, match=re.escape(printed)):
        command.main(words)

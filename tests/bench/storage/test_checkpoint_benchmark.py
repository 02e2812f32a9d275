"""`zaya bench checkpoint` with a tiny state: each method in each number of processes, and no file remains."""

import re
import threading
import time

import pytest

from zaya_jax.bench import command
from zaya_jax.bench.storage import checkpoint
from zaya_jax.bench.storage.checkpoint import ORDER, RATIOS, Timed

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
    assert [row[0] for row in rows if len(row) == 3] == list(RATIOS)
    assert "…" not in out
    assert {"0-one-writer", "0-Orbax", "0-ours"} <= set().union(*folders_at_once)
    assert max(map(len, folders_at_once)) == 1  # the disk needs space for only one of them
    assert list(tmp_path.iterdir()) == []


def test_the_ratios_by_hand():
    blocked = dict.fromkeys(ORDER, 1.0) | {
        "one writer, all gathered": 8.0,
        "ours": 0.5,
        "copy in memory": 0.25,
    }
    safe = dict.fromkeys(ORDER, 2.0) | {"ours": 3.0, "plain files": 1.5}
    timed = Timed(2, 10**9, blocked, safe)
    assert [ratio(timed) for ratio in RATIOS.values()] == [16, 2, 1.5, 2]
    assert checkpoint._figures(timed, "ours") == ["0.500", "3.000", "0.33"]


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["checkpoint", "--gib=0"], "--gib is 0; it must be 0.000976562 or above"),
        (["checkpoint", "--gib=nan"], "--gib is nan; it must be"),
        (["checkpoint", "--gib=1e9"], "--gib is 1e+09, which needs"),
        (["checkpoint", "--folder=none"], '--folder is "none"; it must be a folder'),
        (["checkpoint", "--rounds=0"], "--rounds is 0; it must be at least 1"),
        (["torch", "--gib=2"], "--gib is 2.0; only checkpoint supports it"),
    ],
)
def test_invalid_options_of_checkpoint_are_rejected(words, printed):
    with pytest.raises(ValueError, match=re.escape(printed)):
        command.main(words)

"""`zaya bench checkpoint` with a tiny state: each way is timed in each number of processes, nothing stays."""

import re
import threading
import time

import pytest

from zaya_jax.bench import checkpoint, command
from zaya_jax.bench.checkpoint import ORDER, RATIOS, Timed

GIB = 2**-10


@pytest.fixture
def seen(tmp_path):
    """What lay beside each other on the disk at each moment, looked at all the while."""
    found, done = [], threading.Event()

    def look():
        while not done.is_set():
            found.append({path.name for path in tmp_path.glob("bench-checkpoint-*/0-*")})
            time.sleep(0.005)

    thread = threading.Thread(target=look)
    thread.start()
    yield found
    done.set()
    thread.join()


@pytest.mark.slow
def test_all_ways_and_nothing_left(tmp_path, monkeypatch, capsys, seen):
    monkeypatch.setenv("COLUMNS", "80")
    checkpoint.run(rounds=1, gib=GIB, folder=str(tmp_path), processes=(1, 2))
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert [row[:2] for row in rows if len(row) == 5] == [[count, name] for count in "12" for name in ORDER]
    assert all(float(cell) >= 0 for row in rows for cell in row[2:] if cell)
    assert [row[0] for row in rows if len(row) == 3] == list(RATIOS)
    assert "…" not in out
    assert {"0-one-writer", "0-Orbax", "0-ours"} <= set().union(*seen)
    assert max(map(len, seen)) == 1  # the disk needs room for one of them
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
    ("words", "said"),
    [
        (["checkpoint", "--gib=0"], "--gib is 0; it must be 0.000976562 or above"),
        (["checkpoint", "--gib=nan"], "--gib is nan; it must be"),
        (["checkpoint", "--gib=1e9"], "--gib is 1e+09, which needs"),
        (["checkpoint", "--folder=none"], '--folder is "none"; it must be a folder'),
        (["checkpoint", "--rounds=0"], "--rounds is 0; it must be at least 1"),
        (["torch", "--gib=2"], "--gib is 2.0; only checkpoint has it"),
    ],
)
def test_what_cannot_be_is_refused(words, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        command.main(words)

"""Fault injection: parsing, time and effect of faults."""

import dataclasses
import signal
import subprocess
import sys

import numpy as np
import pytest
from small_runs import write_committed_step

from zaya_jax.aegis.agent.log_rules import classify, load_rules
from zaya_jax.aegis.watch.fault_effects import PROCESS_FAULTS
from zaya_jax.aegis.watch.fault_injection import FOR_EVER, Fault, FaultInjection, parse_faults
from zaya_jax.data.reading.batch import Batch


def test_faults_are_parsed():
    assert parse_faults("") == []
    assert parse_faults("hang@step=12:process=1, kill@step=3:seconds=2.5") == [
        Fault("hang", 12, 1, FOR_EVER),
        Fault("kill", 3, None, 2.5),
    ]
    assert parse_faults("flip_weight@step=5:steps=2:bit=7") == [
        Fault("flip_weight", step, None, FOR_EVER, bit=7) for step in (5, 6)
    ]


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        ("hang", 'ZAYA_FAULT has "hang"; a fault is KIND@step=N'),
        ("kil@step=3", 'ZAYA_FAULT has the unknown fault "kil"; .*kill'),
        ("kill@step=3:rank=1", "a fault is KIND@step=N"),
        ("kill@step=-3", "a fault is KIND@step=N"),
        ("kill@step=3:stays:bit=2", "in this order"),
        ("flip@step=3:bit=32", "the bits of a value are 0 to 31"),
    ],
)
def test_invalid_faults_are_refused(order, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_faults(order)


@pytest.fixture
def struck(monkeypatch):
    """Records the seconds of harmless hangs."""
    found = []
    monkeypatch.setitem(PROCESS_FAULTS, "hang", found.append)
    return found


def batches(count):
    whole, ones = np.arange(4, dtype=np.int32), np.ones(4, np.float32)
    return [Batch(whole, whole + 1, ones, whole, np.ones_like(whole)) for _ in range(count)]


def test_a_fault_occurs_before_its_step_and_once_per_run(tmp_path, struck):
    faults = parse_faults("hang@step=4:seconds=3")
    read = FaultInjection(faults, str(tmp_path), process=0).among(iter(batches(3)), first_step=3)
    next(read)
    assert struck == []
    next(read)
    assert struck == [3.0]
    list(FaultInjection(faults, str(tmp_path), process=0).among(iter(batches(3)), first_step=3))
    assert struck == [3.0]
    # Each process of a run records its own faults.
    list(FaultInjection(faults, str(tmp_path), process=1).among(iter(batches(3)), first_step=3))
    assert struck == [3.0, 3.0]


def test_a_fault_that_stays_occurs_until_another_host_takes_its_place(tmp_path, struck, monkeypatch):
    faults = parse_faults("hang@step=4:process=1:seconds=3:stays")
    for host in ("n1", "n1", "n5", "n1"):
        monkeypatch.setenv("NODE_NAME", host)
        list(FaultInjection(faults, str(tmp_path), process=1).among(iter(batches(3)), first_step=3))
    assert len(struck) == 3


def test_other_processes_are_unaffected(tmp_path, struck):
    faults = parse_faults("hang@step=4:process=2")
    list(FaultInjection(faults, str(tmp_path), process=0).among(iter(batches(3)), first_step=3))
    assert struck == []


def test_a_nan_fault_sets_all_weights_to_nan(tmp_path):
    given = batches(3)
    read = FaultInjection(parse_faults("nan@step=2"), str(tmp_path), process=0).among(
        iter(given), first_step=1
    )
    found = list(read)
    assert [np.isnan(batch.weights_BT).all() for batch in found] == [False, True, False]
    np.testing.assert_array_equal(found[1].tokens_BT, given[1].tokens_BT)


@pytest.mark.parametrize(
    ("kind", "ending"),
    [("kill", signal.SIGKILL), ("abort", signal.SIGABRT), ("segfault", signal.SIGSEGV)],
)
def test_a_process_ends_by_the_signal_of_its_fault(kind, ending):
    program = f"from zaya_jax.aegis.watch.fault_effects import PROCESS_FAULTS; PROCESS_FAULTS[{kind!r}](1.0)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == -ending


def test_a_fail_fault_raises():
    with pytest.raises(RuntimeError, match="an injected fault"):
        PROCESS_FAULTS["fail"](1.0)


@pytest.mark.parametrize(
    ("kind", "expected"), [("stale", [0, 1, 1, 3]), ("lost", [0, 1, 3]), ("reorder", [0, 1, 3, 2])]
)
def test_batches_are_repeated_and_lost(kind, expected, tmp_path):
    given = [dataclasses.replace(batch, positions_BT=np.full(4, n)) for n, batch in enumerate(batches(4))]
    faults = parse_faults(f"{kind}@step=3")
    read = FaultInjection(faults, str(tmp_path), process=0).among(iter(given), first_step=1)
    assert [batch.positions_BT[0] for batch in read] == expected


@pytest.mark.parametrize(("kind", "num_bytes"), [("corrupt", 8000), ("truncate", 4000), ("remove", None)])
def test_the_largest_file_of_the_newest_checkpoint_is_damaged(kind, num_bytes, tmp_path):
    for step in (4, 8):
        write_committed_step(tmp_path, step)
        (tmp_path / f"checkpoints/{step}/weights/data").write_bytes(b"abcdefgh" * 1000)
    list(
        FaultInjection(parse_faults(f"{kind}@step=3"), str(tmp_path), 0).among(iter(batches(3)), first_step=2)
    )
    old, new = (tmp_path / f"checkpoints/{step}/weights/data" for step in (4, 8))
    assert old.read_bytes() == b"abcdefgh" * 1000
    assert (new.stat().st_size if new.exists() else None) == num_bytes
    assert not new.exists() or new.read_bytes() != old.read_bytes()
    # The record says what is damaged, for a drill that compares it with what was noticed.
    assert (tmp_path / f"faults/{kind}-3-0").read_text() == "8"


def test_memory_runs_out_with_an_error_that_the_rules_know():
    program = "from zaya_jax.aegis.watch.fault_effects import PROCESS_FAULTS; PROCESS_FAULTS['exhaust'](1.0)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    rule = classify(load_rules(), ended.stderr.splitlines()[-1])
    assert rule is not None
    assert (ended.returncode, rule.name) == (1, "host_out_of_memory")

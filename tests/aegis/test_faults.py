"""Faults on order."""

import signal
import subprocess
import sys

import numpy as np
import pytest

from zaya_jax.aegis.faults import ACTS, FOR_EVER, Fault, Faults, parse_faults
from zaya_jax.data.batch import Batch


def test_an_order_is_read():
    assert parse_faults("") == []
    assert parse_faults("hang@step=12:process=1, kill@step=3:seconds=2.5") == [
        Fault("hang", 12, 1, FOR_EVER),
        Fault("kill", 3, None, 2.5),
    ]


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        ("hang", 'ZAYA_FAULT has "hang"; a fault is KIND@step=N'),
        ("kil@step=3", 'ZAYA_FAULT has the fault "kil"; .*kill'),
        ("kill@step=3:rank=1", "a fault is KIND@step=N"),
        ("kill@step=-3", "a fault is KIND@step=N"),
    ],
)
def test_what_is_no_order_is_refused(order, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_faults(order)


@pytest.fixture
def struck(monkeypatch):
    """Seconds of the faults that struck, none of which does any harm."""
    found = []
    monkeypatch.setitem(ACTS, "hang", found.append)
    return found


def batches(count):
    whole, ones = np.arange(4, dtype=np.int32), np.ones(4, np.float32)
    return [Batch(whole, whole + 1, ones, whole, np.ones_like(whole)) for _ in range(count)]


def test_a_fault_strikes_before_its_step_and_once_in_a_runs_life(tmp_path, struck):
    faults = parse_faults("hang@step=4:seconds=3")
    read = Faults(faults, str(tmp_path), process=0).among(iter(batches(3)), first_step=3)
    next(read)
    assert struck == []
    next(read)
    assert struck == [3.0]
    list(Faults(faults, str(tmp_path), process=0).among(iter(batches(3)), first_step=3))
    assert struck == [3.0]
    # Of a run of several processes each has its own.
    list(Faults(faults, str(tmp_path), process=1).among(iter(batches(3)), first_step=3))
    assert struck == [3.0, 3.0]


def test_another_process_is_spared(tmp_path, struck):
    faults = parse_faults("hang@step=4:process=2")
    list(Faults(faults, str(tmp_path), process=0).among(iter(batches(3)), first_step=3))
    assert struck == []


def test_a_spoilt_batch_teaches_what_is_no_number(tmp_path):
    given = batches(3)
    read = Faults(parse_faults("nan@step=2"), str(tmp_path), process=0).among(iter(given), first_step=1)
    found = list(read)
    assert [np.isnan(batch.weights_BT).all() for batch in found] == [False, True, False]
    np.testing.assert_array_equal(found[1].tokens_BT, given[1].tokens_BT)


@pytest.mark.parametrize(
    ("kind", "ending"),
    [("kill", signal.SIGKILL), ("abort", signal.SIGABRT), ("terminate", signal.SIGTERM)],
)
def test_a_process_ends_as_it_is_ordered(kind, ending):
    program = f"from zaya_jax.aegis.faults import ACTS; ACTS[{kind!r}](1.0)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == -ending


def test_a_failure_is_one_of_the_program():
    with pytest.raises(RuntimeError, match="a fault on order"):
        ACTS["fail"](1.0)

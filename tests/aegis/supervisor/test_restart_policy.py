"""Decisions of the restart policy."""

import pytest

from zaya_jax.aegis.agent.sightings import Sighting
from zaya_jax.aegis.supervisor.diagnosis import Diagnosis
from zaya_jax.aegis.supervisor.restart_policy import (
    DONE,
    EXCLUDE,
    REQUEUE,
    RESTART,
    STOP,
    WAIT,
    Attempt,
    RestartPolicy,
    decide,
)

NODES = ("n1", "n2", "n3")
POLICY = RestartPolicy(nodes=3, min_nodes=3, max_attempts_without_progress=3, wait_seconds=8.0)


def attempt(code=1, *, progress=True, **values):
    return Attempt(code, progress, NODES, **values)


def sighting(action, host="n2", name="some_class"):
    return Sighting(1.0, host, name, action, "dmesg", "a line")


@pytest.mark.parametrize(
    ("attempts", "action"),
    [
        ([attempt(0)], DONE),
        ([attempt(2)], STOP),
        ([attempt(65)], STOP),
        ([attempt(130)], STOP),
        ([attempt(75, stop_requested=True)], REQUEUE),
        ([attempt(0, stop_requested=True)], DONE),
        ([attempt(75)], RESTART),
        ([attempt(137)], RESTART),
        ([attempt(76, diverged=("n3",))], EXCLUDE),
        ([attempt(76)], RESTART),
        ([attempt(124, diagnosis=Diagnosis("stall", ("n1",)))], RESTART),
        (
            [
                attempt(124, diagnosis=Diagnosis("stall", ("n1",))),
                attempt(124, diagnosis=Diagnosis("stall", ("n1",))),
            ],
            EXCLUDE,
        ),
        (
            [
                attempt(124, diagnosis=Diagnosis("stall", ("n1",))),
                attempt(124, diagnosis=Diagnosis("stall", ("n2",))),
            ],
            RESTART,
        ),
        (
            [
                attempt(124, diagnosis=Diagnosis("stall", ("n1",))),
                attempt(137),
                attempt(124, diagnosis=Diagnosis("stall", ("n1",))),
            ],
            RESTART,
        ),
        ([attempt(137, diagnosis=Diagnosis("killed", ("n1",)))] * 2, EXCLUDE),
        ([attempt(1, diagnosis=Diagnosis("error", ("n1",)))] * 2, RESTART),
        ([attempt(75, diagnosis=Diagnosis("network", ("n1", "n2")))] * 2, RESTART),
        ([attempt(sightings=(sighting("drain"),))], EXCLUDE),
        ([attempt(sightings=(sighting("wait"),))], WAIT),
        ([attempt(sightings=(sighting("note"), sighting("restart")))], RESTART),
        ([attempt(sightings=(sighting("page"),))], RESTART),
        ([attempt(progress=False, sightings=(sighting("page"),))] * 2, WAIT),
        ([attempt(progress=False)], RESTART),
        ([attempt(progress=False)] * 2, WAIT),
        ([attempt(progress=False)] * 3, STOP),
        ([attempt(progress=False)] * 2 + [attempt()] + [attempt(progress=False)], RESTART),
    ],
)
def test_actions(attempts, action):
    assert decide(attempts, ("n1", "n2", "n3", "n4"), POLICY).action == action


def test_decisions_that_notify_a_human():
    usable = (*NODES, "n4")
    assert not decide([attempt(137)], usable, POLICY).page
    for last in (attempt(2), attempt(76, diverged=("n1",)), attempt(sightings=(sighting("page"),))):
        assert decide([last], usable, POLICY).page
    assert decide([attempt(progress=False)] * 3, usable, POLICY).page


def test_nodes_are_excluded_while_enough_remain():
    last = attempt(76, diverged=("n3",), sightings=(sighting("drain"),))
    found = decide([last], (*NODES, "n4", "n5"), POLICY)
    assert (found.action, set(found.nodes)) == (EXCLUDE, {"n2", "n3"})
    assert any("a line" in each for each in found.evidence)
    assert any("devices of n3" in each for each in found.evidence)
    found = decide([last], (*NODES, "n4"), POLICY)
    assert found.action == RESTART
    assert found.page
    assert "should be excluded" in found.reason
    assert decide([last], NODES, RestartPolicy(nodes=3, min_nodes=1)).action == EXCLUDE


def test_sightings_on_other_nodes_are_ignored():
    assert decide([attempt(sightings=(sighting("drain", host="n9"),))], NODES, POLICY).action == RESTART


def test_pauses_double_and_count_as_cost():
    policy = RestartPolicy(nodes=3, min_nodes=3, max_attempts_without_progress=9, wait_seconds=8.0)
    flaps = [attempt(progress=False, sightings=(sighting("wait"),), lost_seconds=5.0)] * 4
    found = [decide(flaps[:n], NODES, policy) for n in (1, 2, 3, 4)]
    assert [each.wait_seconds for each in found] == [8.0, 16.0, 32.0, 64.0]
    assert [each.cost_seconds for each in found] == [13.0, 21.0, 37.0, 69.0]

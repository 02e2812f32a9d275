"""Scores of drills, from synthetic events: what is noticed, and who is named."""

import pytest

from zaya_jax.aegis.agent.sightings import Sighting
from zaya_jax.aegis.drill.campaign import FaultTrial, plan_campaign
from zaya_jax.aegis.drill.command import Score, score_json, summary
from zaya_jax.aegis.drill.scoring import NamedCause, Truth, find_alarms, read_truth, score_trial
from zaya_jax.run_folder.names import (
    AT,
    BEGAN,
    CORRUPTED,
    DAMAGED,
    DECIDED,
    FAULTS_FOLDER,
    FINISHED,
    SKIPPED,
    STRAGGLING,
)

KILL = FaultTrial(kind="kill", step=30, faults="kill@step=30:process=2")
TRUTH = Truth(100.0, frozenset({NamedCause("killed", "node2")}))


def event(kind, time=101.0, **values):
    return {"event": kind, "time": time} | values


def decided(cause="killed", hosts=("node2",), **values):
    return event(DECIDED, action="restart", cause=cause, hosts=list(hosts), **values)


RECOVERY = [
    event(BEGAN, 109.0, step=24, seconds={"start": 2.0, "compile": 3.0}),
    event(AT, 110.0, step=25),
]


def sighting(name="program_error", host="node2", action="page"):
    return Sighting(101.0, host, name, action, "standard error", "RuntimeError: a")


@pytest.mark.parametrize(
    ("events", "is_noticed", "is_named"),
    [
        ([decided()], True, True),
        ([decided(), decided()], True, True),
        ([decided(hosts=["node1"])], True, False),
        ([decided(hosts=["node1", "node2"])], True, False),
        ([decided(hosts=[])], True, False),
        ([decided(cause="stall")], True, False),
        ([decided(cause="", hosts=[])], True, False),
        ([decided(), event(DAMAGED, step=24)], True, False),
        ([event(AT, step=31)], False, False),
        ([event(DECIDED, action="done", cause="", hosts=[])], False, False),
    ],
)
def test_a_fault_must_be_named_with_its_cause_and_host_alone(events, is_noticed, is_named):
    outcome = score_trial(KILL, TRUTH, events, [])
    assert (outcome.is_noticed, outcome.is_named) == (is_noticed, is_named)


def test_a_recovery_is_timed_to_its_first_step():
    outcome = score_trial(KILL, TRUTH, [decided(), *RECOVERY], [])
    assert outcome.lost_steps == 5
    assert outcome.total == pytest.approx(10.0)
    assert outcome.seconds["notice and end"] == pytest.approx(1.0)
    assert outcome.seconds["compile and first step"] == pytest.approx(4.0)
    assert score_trial(KILL, TRUTH, [decided()], []).seconds == {}


def test_steps_until_a_late_notice_are_lost_too():
    late = [event(CORRUPTED, step=34, findings=[], hosts=[]), decided(), *RECOVERY]
    assert score_trial(KILL, TRUTH, late, []).lost_steps == 10


@pytest.mark.parametrize(
    ("finding", "events", "sightings"),
    [
        (NamedCause("slow", "node1"), [event(STRAGGLING, host="node1")], []),
        (NamedCause("not finite", ""), [event(SKIPPED, step=30)], []),
        (NamedCause("damaged checkpoint", "24"), [event(DAMAGED, step=24)], []),
        (NamedCause("error", "node2"), [], [sighting()]),
        (NamedCause("killed", "node2"), [decided()], [sighting()]),
    ],
)
def test_what_is_reported(finding, events, sightings):
    """A line of a log counts by itself only if the supervisor has not decided on it."""
    assert score_trial(KILL, TRUTH, events, sightings).reported == {finding}


def test_the_truth_is_what_the_injection_left(tmp_path):
    trial = FaultTrial(
        kind="mine", step=30, faults="corrupt@step=30:process=0,kill@step=31:process=2,nan@step=33"
    )
    assert read_truth(tmp_path, trial) is None
    (tmp_path / FAULTS_FOLDER).mkdir()
    for name, text in {
        "corrupt-30-0": "24",
        "kill-31-2": "node7",
        "kill-31-1": "no",
        "nan-33-3": "n",
    }.items():
        (tmp_path / FAULTS_FOLDER / name).write_text(text)
    truth = read_truth(tmp_path, trial)
    assert truth is not None
    assert truth.findings == {
        NamedCause("damaged checkpoint", "24"),
        NamedCause("killed", "node7"),
        NamedCause("not finite", ""),
    }


def test_alarms_of_a_run_without_faults():
    quiet = [event(BEGAN, step=0), event(FINISHED), event(DECIDED, action="done", reason="complete")]
    assert find_alarms(quiet, [sighting("link_up", action="note")]) == []
    loud = [*quiet, decided(reason="killed"), event(STRAGGLING, reason="slow")]
    assert find_alarms(loud, [sighting()]) == [
        "straggling: slow",
        "restart: killed",
        "node2: program_error: RuntimeError: a",
    ]


def test_a_score_counts_by_kind_and_fails_for_one_flaw():
    good = score_trial(KILL, TRUTH, [decided(), *RECOVERY], [], is_equal=True)
    assert summary([good]) == {
        "trials": 1, "noticed": 1, "named": 1, "lost_steps": 5, "comparable": 1, "equal": 1,
        "median_seconds": pytest.approx(10.0), "worst_seconds": pytest.approx(10.0),
    }  # fmt: skip
    campaign = plan_campaign(0, processes=4, rounds=1, kinds=["kill"])
    assert Score(campaign, (good,), (), (0, 0), True).is_passed
    different = score_trial(KILL, TRUTH, [decided(), *RECOVERY], [], is_equal=False)
    unseen = score_trial(KILL, TRUTH, [], [], is_equal=True)
    misnamed = score_trial(KILL, TRUTH, [decided(hosts=["node1"])], [], is_equal=True)
    for flawed in (
        Score(campaign, (different,), (), (0, 0), True),
        Score(campaign, (unseen,), (), (0, 0), True),
        Score(campaign, (misnamed,), (), (0, 0), True),
        Score(campaign, (), (), (0, 0), True),
        Score(campaign, (good,), ("stalled",), (0, 0), True),
        Score(campaign, (good,), (), (0, 1), None),
        Score(campaign, (good,), (), (0, 0), False),
    ):
        assert not flawed.is_passed
        assert not score_json(flawed)["passed"]

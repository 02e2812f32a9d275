"""Campaigns of drills: seeds, files, and the places of their faults."""

import json
import re

import pytest

from zaya_jax.aegis.drill.campaign import (
    BITS,
    COURSE_CHANGING,
    FIRST_STEPS,
    KINDS,
    WINDOW,
    plan_campaign,
    read_campaign,
    write_campaign,
)
from zaya_jax.aegis.watch.fault_injection import parse_faults
from zaya_jax.errors import UserError


def plan(seed=0, **values):
    return plan_campaign(seed, **({"processes": 4, "rounds": 2} | values))


def test_a_seed_reproduces_its_campaign():
    assert plan(7) == plan(7)
    assert plan(7) != plan(8)


def test_every_kind_occurs_in_each_round_in_separate_windows():
    campaign = plan()
    kinds = [trial.kind for trial in campaign.trials]
    assert sorted(kinds) == sorted(2 * list(KINDS))
    # After a fault that changes the course no trial could be compared with an undisturbed run.
    assert set(kinds[-2 * len(COURSE_CHANGING) :]) == set(COURSE_CHANGING)
    begins = [trial.begin for trial in campaign.trials]
    assert begins == list(range(FIRST_STEPS, FIRST_STEPS + WINDOW * len(kinds), WINDOW))
    for trial in campaign.trials:
        faults = parse_faults(trial.faults)
        assert trial.begin < trial.step
        assert all(trial.begin <= fault.step < trial.begin + WINDOW for fault in faults)
        assert all(fault.process is None or 0 <= fault.process < 4 for fault in faults)


def test_bits_are_those_of_their_part():
    for trial in plan(3).trials:
        part, bit = trial.kind.rpartition(": ")[2], re.search(r"bit=(\d+)", trial.faults)
        if part in BITS:
            assert bit is not None
            assert BITS[part][0] <= int(bit[1]) <= BITS[part][1]


def test_a_written_campaign_is_read_again(tmp_path):
    campaign = plan(kinds=["hang", "slowness"])
    assert {trial.kind for trial in campaign.trials} == {"hang", "slowness"}
    write_campaign(campaign, tmp_path / "campaign.json")
    assert read_campaign(tmp_path / "campaign.json") == campaign


TRIAL = {"kind": "mine", "step": 30, "faults": "kill@step=30:process=1"}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"trials": []}, "there must be one or more"),
        ({"trials": [TRIAL, TRIAL]}, "in different windows of 12 steps"),
        ({"trials": [TRIAL | {"step": 31}]}, 'the trial "mine" has step 31'),
        ({"trials": [TRIAL | {"faults": "kil@step=30"}]}, 'unknown fault "kil"; did you mean "kill"'),
        ({"trials": [TRIAL], "processes": 1}, "processes is 1"),
        ({"trials": [TRIAL], "sed": 3}, "sed"),
    ],
)
def test_invalid_campaigns_are_refused(values, sentence, tmp_path):
    file = tmp_path / "campaign.json"
    file.write_text(json.dumps({"processes": 4} | values))
    with pytest.raises(UserError, match=sentence):
        read_campaign(file)


def test_unknown_kinds_are_refused():
    with pytest.raises(UserError, match='unknown kind of trial "hand"; did you mean "hang"'):
        plan(kinds=["hand"])

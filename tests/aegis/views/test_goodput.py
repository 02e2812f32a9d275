"""Events of a run, and its goodput."""

import json

import pytest
from synthetic_runs import FINAL, KILLED, STALLED_ATTEMPT, event

from zaya_jax.aegis.command import describe_status, main
from zaya_jax.aegis.views.goodput import (
    BUCKETS,
    DATA_WAIT,
    DOWN,
    HANG,
    LOST,
    OTHER,
    PRODUCTIVE,
    buckets_of,
    measure,
)
from zaya_jax.run_folder.events import read_events, write_event
from zaya_jax.run_folder.names import AT, BEGAN, CAUGHT_UP, EVENTS_FILE, FAILED, STRAGGLING
from zaya_jax.train.heartbeats import COMPILE, EVALUATE, READ, RESTORE, SAVE, START, STEP, TASKS


def test_buckets_add_up_to_the_total_time():
    found = measure(KILLED + STALLED_ATTEMPT + FINAL)
    assert found.seconds == dict.fromkeys(BUCKETS, 0.0) | {
        START: 17.0,
        RESTORE: 3.0,
        COMPILE: 40.0,
        DATA_WAIT: 6.0,
        SAVE: 18.0,
        # 51 of 101 steps in 100 seconds, and 10 of 40 steps in 40 seconds, were repeated.
        PRODUCTIVE: pytest.approx(100 * 50 / 101 + 30 + 20),
        LOST: pytest.approx(100 * 51 / 101 + 10),
        HANG: 44.0,
        DOWN: 25.0 + 35.0,
        OTHER: 2.0,
    }
    assert found.total == pytest.approx(350)
    assert (found.attempts, found.steps, found.lost_steps) == (3, 100, 61)
    assert found.share == pytest.approx((100 * 50 / 101 + 50) / 350)


def test_a_run_without_failures_has_no_losses():
    found = measure(FINAL)
    assert (found.seconds[LOST], found.seconds[DOWN], found.lost_steps) == (0, 0, 0)


def test_malformed_reports_are_ignored():
    """Other programs may append to the file, and other versions may have written it."""
    strange = [
        event(1302, BEGAN, 7),
        event(1303, AT, "7", seconds={START: 1}),
        event(1304, AT, 7, seconds=[1]),
        event(1305, AT, 7, seconds={START: float("nan")}),
        event(1306, "decided", 7, action="go on"),
    ]
    assert measure([FINAL[0], *strange, FINAL[1]]) == measure(FINAL)
    sections = FINAL[1]["seconds"] | {"a section of tomorrow": 1.0}
    goodput = measure([FINAL[0], FINAL[1] | {"seconds": sections}])
    assert goodput == measure(FINAL)


def test_attempts_without_steps_are_ignored():
    early = event(900, FAILED, 0, reason="ValueError: no corpus")
    assert measure([early, *FINAL]) == measure(FINAL)
    with pytest.raises(ValueError, match="the run has no event of its first step"):
        measure([early])


PLACE = {"process": 2, "host": "n2", "device": None, "section": READ}
SLOW = event(1310, STRAGGLING, 90, **PLACE, share=0.12, reason="process 2 on n2")
SLOW_3 = SLOW | {"process": 3, "reason": "process 3 on n3"}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (KILLED, "at step 101, last event 220 s ago"),
        (
            KILLED + STALLED_ATTEMPT,
            "stalled 90 s ago at step 90, after 2 attempts: process 0 is stalled; late: process 3",
        ),
        (KILLED + STALLED_ATTEMPT + FINAL, "finished 0 s ago at step 100, after 3 attempts"),
        (FINAL[:1], "running at step 80, last event 50 s ago"),
        (
            [*FINAL[:1], SLOW, SLOW_3, SLOW | {"event": CAUGHT_UP}],
            "running at step 80, last event 50 s ago; straggler: process 3 on n3",
        ),
        ([*KILLED, SLOW, *FINAL[:1]], "running at step 80, after 2 attempts, last event 50 s ago"),
    ],
)
def test_status(events, expected):
    actual = describe_status(events, now=1350.0)
    assert actual.startswith(expected)
    assert actual.count("straggler") == expected.count("straggler")


def test_an_incomplete_line_does_not_damage_the_next(tmp_path):
    write_event(tmp_path, BEGAN, step=0, seconds={START: 1.0}, processes=1, devices=1)
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write('{"time": 17, "eve')
    write_event(tmp_path, AT, step=3, seconds={START: 1.0, STEP: 3.0})
    assert [(each["event"], each["step"]) for each in read_events(tmp_path)] == [(BEGAN, 0), (AT, 3)]


def test_a_failed_write_of_an_event_is_ignored(tmp_path):
    write_event(tmp_path / "nowhere", AT, step=3)


@pytest.mark.parametrize("what", ["status", "events", "goodput"])
def test_folders_without_events_are_rejected(what, tmp_path):
    with pytest.raises(ValueError, match=r"has no events.jsonl; it must be the folder of a run"):
        main([what, str(tmp_path)])
    (tmp_path / EVENTS_FILE).write_text("\x00\x00 no event\n[]\n")
    with pytest.raises(ValueError, match="contains no event"):
        main([what, str(tmp_path)])


def test_tables_of_events_and_goodput(tmp_path, capsys):
    for each in KILLED + STALLED_ATTEMPT + FINAL:
        write_event(tmp_path, each["event"], **{k: v for k, v in each.items() if k not in ("time", "event")})
    main(["events", str(tmp_path)])
    output = capsys.readouterr().out
    assert output.count(BEGAN) == 3
    assert "4 processes, 8 devices" in output
    assert "late: process" in output
    main(["goodput", str(tmp_path)])
    output = capsys.readouterr().out
    assert all(bucket in output for bucket in BUCKETS)
    assert "61 steps repeated" in output
    main(["goodput", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["lost_steps"] == 61


def test_sections_of_one_bucket_add_up():
    seconds = buckets_of({EVALUATE: 5.0, TASKS: 3.0, STEP: 2.0}, lost_share=0.0)
    assert seconds[EVALUATE] == 8.0

"""Events of a run, and what its time went into."""

import json

import pytest
from made_runs import FINAL, KILLED, STOOD_STILL, event

from zaya_jax.aegis.command import describe_status, main
from zaya_jax.aegis.goodput import BUCKETS, DATA_WAIT, DOWN, HANG, LOST, OTHER, PRODUCTIVE, measure
from zaya_jax.aegis.heartbeats import COMPILE, RESTORE, SAVE, START, STEP
from zaya_jax.aegis.journal import (
    AT,
    BEGAN,
    EVENTS_FILE,
    FAILED,
    read_events,
    write_event,
)


def test_time_goes_into_buckets_and_none_is_lost():
    found = measure(KILLED + STOOD_STILL + FINAL)
    assert found.seconds == dict.fromkeys(BUCKETS, 0.0) | {
        START: 17.0,
        RESTORE: 3.0,
        COMPILE: 40.0,
        DATA_WAIT: 6.0,
        SAVE: 18.0,
        # 51 of 101 steps in 100 seconds, 10 of 40 in 40 were made again.
        PRODUCTIVE: pytest.approx(100 * 50 / 101 + 30 + 20),
        LOST: pytest.approx(100 * 51 / 101 + 10),
        HANG: 44.0,
        DOWN: 25.0 + 35.0,
        OTHER: 2.0,
    }
    assert found.total == pytest.approx(350)
    assert (found.attempts, found.steps, found.lost_steps) == (3, 100, 61)
    assert found.share == pytest.approx((100 * 50 / 101 + 50) / 350)


def test_a_run_that_was_never_disturbed_has_lost_nothing():
    found = measure(FINAL)
    assert (found.seconds[LOST], found.seconds[DOWN], found.lost_steps) == (0, 0, 0)


def test_what_others_wrote_is_no_word_of_a_life():
    """A file that anyone may append to, and that another version of this began."""
    strange = [
        event(1302, BEGAN, 7),
        event(1303, AT, "7", seconds={START: 1}),
        event(1304, AT, 7, seconds=[1]),
        event(1305, AT, 7, seconds={START: float("nan")}),
        event(1306, "decided", 7, action="go on"),
    ]
    assert measure([FINAL[0], *strange, FINAL[1]]) == measure(FINAL)
    sections = FINAL[1]["seconds"] | {"a section of tomorrow": 1.0}
    told = measure([FINAL[0], FINAL[1] | {"seconds": sections}])
    assert told == measure(FINAL)


def test_what_failed_before_its_steps_is_no_life_of_the_run():
    early = event(900, FAILED, 0, reason="ValueError: no corpus")
    assert measure([early, *FINAL]) == measure(FINAL)
    with pytest.raises(ValueError, match="no event says that the run began its steps"):
        measure([early])


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (KILLED, "at step 101, and silent since 220 s ago"),
        (
            KILLED + STOOD_STILL,
            "stalled 90 s ago at step 90, begun 2 times: process 0 stands; late: process 3",
        ),
        (KILLED + STOOD_STILL + FINAL, "finished 0 s ago at step 100, begun 3 times"),
        (FINAL[:1], "running at step 80, heard of 50 s ago"),
    ],
)
def test_status_says_where_a_run_is(events, expected):
    assert describe_status(events, now=1350.0).startswith(expected)


def test_a_half_line_of_a_killed_process_costs_no_other(tmp_path):
    write_event(tmp_path, BEGAN, step=0, seconds={START: 1.0}, processes=1, devices=1)
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write('{"time": 17, "eve')
    write_event(tmp_path, AT, step=3, seconds={START: 1.0, STEP: 3.0})
    assert [(each["event"], each["step"]) for each in read_events(tmp_path)] == [(BEGAN, 0), (AT, 3)]


def test_a_disk_that_takes_no_event_ends_no_run(tmp_path):
    write_event(tmp_path / "nowhere", AT, step=3)


@pytest.mark.parametrize("what", ["status", "events", "goodput"])
def test_a_folder_that_is_no_run_is_refused(what, tmp_path):
    with pytest.raises(ValueError, match=r"has no events.jsonl; it must be the folder of a run"):
        main([what, str(tmp_path)])
    (tmp_path / EVENTS_FILE).write_text("\x00\x00 no event\n[]\n")
    with pytest.raises(ValueError, match="holds no event"):
        main([what, str(tmp_path)])


def test_the_tables_show_all_that_happened(tmp_path, capsys):
    for each in KILLED + STOOD_STILL + FINAL:
        write_event(tmp_path, each["event"], **{k: v for k, v in each.items() if k not in ("time", "event")})
    main(["events", str(tmp_path)])
    said = capsys.readouterr().out
    assert said.count(BEGAN) == 3
    assert "4 processes, 8 devices" in said
    assert "late: process" in said
    main(["goodput", str(tmp_path)])
    said = capsys.readouterr().out
    assert all(bucket in said for bucket in BUCKETS)
    assert "61 steps made again" in said
    main(["goodput", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["lost_steps"] == 61

"""A run in one page: what it shows lies where it happened, and what others wrote stays text."""

import base64
import hashlib
import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import xml.etree.ElementTree

import pytest
from made_runs import DISTURBED, FINAL, KILLED, ROW, event, write_events, write_rows

from zaya_jax.aegis.command import main
from zaya_jax.aegis.goodput import BUCKETS, DOWN, HANG, LOST, PRODUCTIVE, find_attempts, measure
from zaya_jax.aegis.journal import AT, DECIDED, SPIKED
from zaya_jax.aegis.sightings import Sighting, write_sighting
from zaya_jax.aegis.timeline import (
    DECISIONS,
    EVENTS,
    MOST_POINTS,
    MOST_SLICES,
    SIGHTINGS,
    losses_of,
    marks_of,
    slices_of,
    steps_of,
)
from zaya_jax.aegis.timeline_page import WIDTH, page_of

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">&lt;\u2028'


class Tags(html.parser.HTMLParser):
    """All that a browser would take for tags, and the text within each."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.inside, self._newest = [], {}, ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._newest = dict(attrs).get("id") or tag

    def handle_data(self, data):
        self.inside.setdefault(self._newest, data)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    there = event(1140, "an odd kind", 3, reason="there it stands")
    decided = event(1150, DECIDED, 101, action="restart", reason=HOSTILE)
    write_events(folder, [*DISTURBED, there, decided])
    write_rows(folder, [ROW | {"step": step, "loss": 2 + 1 / step} for step in range(10, 101, 10)])
    write_sighting(folder, Sighting(1145.0, "n1", "link_down", "wait", "dmesg", HOSTILE))
    write_sighting(folder, Sighting(1e9, "n2", "link_down", "wait", "dmesg", "a clock that is ahead"))
    return folder


def test_stretches_add_up_to_what_goodput_says():
    found = dict.fromkeys(BUCKETS, 0.0)
    for each in slices_of(DISTURBED):
        assert sum(each.seconds.values()) == pytest.approx(each.end - each.start)
        for bucket, seconds in each.seconds.items():
            found[bucket] += seconds
    expected = dict(measure(DISTURBED).seconds)
    # Here by the steps of each stretch, there by those of a life.
    made = [sum(each.pop(bucket) for bucket in (PRODUCTIVE, LOST)) for each in (found, expected)]
    assert made[0] == pytest.approx(made[1])
    assert found == pytest.approx(expected)


def test_a_stretch_is_lost_as_far_as_its_steps_were_made_again():
    of_killed = slices_of(DISTURBED)[2]
    assert (of_killed.start, of_killed.end) == (1030, 1130)
    assert of_killed.seconds == {PRODUCTIVE: pytest.approx(49), LOST: pytest.approx(51)}
    kinds = [set(each.seconds) for each in slices_of(DISTURBED)]
    assert [kind for kind in kinds if DOWN in kind] == [{DOWN}, {DOWN}]
    assert [HANG in kind for kind in kinds].count(True) == 1


def test_long_runs_have_no_more_stretches_and_points_than_one_sees(tmp_path):
    words = [
        event(1030 + i, AT, 1 + i, seconds={"start": 10.0, "compile": 20.0, "step": float(i)})
        for i in range(20_000)
    ]
    events = [KILLED[0], *words]
    slices, lives = slices_of(events), find_attempts(events)
    assert MOST_SLICES / 2 < len(slices) <= MOST_SLICES + 2
    assert sum(each.seconds.get(PRODUCTIVE, 0.0) for each in slices) == pytest.approx(19_999)
    (steps,) = steps_of(lives)
    assert len(steps) <= MOST_POINTS + 1
    assert steps[-1] == (21_029.0, 20_000)
    write_rows(
        tmp_path, [ROW | {"step": step, "loss": 9.0 if step == 7777 else 2.0} for step in range(2, 20_000)]
    )
    (losses,) = losses_of(tmp_path, lives)
    assert len(losses) <= MOST_POINTS
    assert [time for time, loss in losses if loss == 9] == [1030 + 7776]


def test_a_loss_stands_where_the_last_life_made_its_step(tmp_path):
    lines = [ROW | {"step": step, "loss": float(step)} for step in (40, 60, 90)]
    strange = [{"step": 70, "kind": "train", "loss": "2"}, {"step": 70, "kind": "validation", "loss": 1.0}]
    write_rows(tmp_path, [*lines, *strange, ROW | {"step": 5000}])
    found = losses_of(tmp_path, find_attempts(DISTURBED))
    assert found == [[(1069.0, 40.0)], [(1185.0, 60.0)], [(1325.0, 90.0)]]


def test_marks_are_all_that_is_no_word_on_where_a_run_is():
    seen = [Sighting(1140.0, "n1", "link_down", "wait", "dmesg", "eth0"), Sighting(float("nan"), *"abcde")]
    strange = [event(1135, "an odd kind", "a"), event(1200, DECIDED, 1, action="stop", reason="enough")]
    marks = marks_of(DISTURBED + strange, seen)
    assert [(mark.time, mark.lane, mark.step) for mark in marks[1:4]] == [
        (1135, EVENTS, None),
        (1140, SIGHTINGS, None),
        (1160, EVENTS, 50),
    ]
    assert [mark.text for mark in marks if mark.lane == DECISIONS] == ["stop: enough"]
    assert len(marks) == 5 + 3


def test_what_others_wrote_stays_text(run):
    page = page_of(run)
    found = Tags(page)
    scripts = [attributes for tag, attributes in found.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    assert "img" not in {tag for tag, _ in found.tags}
    texts = [text for *_, text in json.loads(found.inside["data"])["marks"]]
    assert f"restart: {HOSTILE}" in texts
    assert f"n1, wait: {HOSTILE}" in texts
    assert not any("ahead" in text for text in texts)
    name = run.with_name("<b onclick=alert(1)>")
    shutil.copytree(run, name)
    assert "b" not in {tag for tag, _ in Tags(page_of(name)).tags}


def test_a_page_asks_nobody_for_anything(run):
    page = page_of(run)
    found = Tags(page)
    attributes = {name for _, given in found.tags for name in given}
    assert not attributes & {"src", "href", "action", "style", "srcset", "onload", "onclick", "onerror"}
    (policy,) = [given["content"] for tag, given in found.tags if tag == "meta" and "http-equiv" in given]
    assert policy.startswith("default-src 'none'")
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
        assert "url(" not in content
        assert "innerHTML" not in content


def test_drawings_are_svg_within_their_width(run):
    drawings = re.findall(r"<svg .*?</svg>", page_of(run), re.DOTALL)
    lanes = {}
    for drawing in map(xml.etree.ElementTree.fromstring, drawings):
        lanes[drawing.get("data-lane")] = drawing
        for path in drawing.iter("path"):
            assert all(0 <= int(place) <= WIDTH for place in re.findall(r"[MLH](\d+)", path.get("d", "")))
    assert [rect.get("class") for rect in lanes["lives"]] == ["t-bad", "t-bad", "t-good"]
    # From 1000 to 1350: the life that stood still began at 1155.
    assert lanes["lives"][1].get("x") == str(round(WIDTH * 155 / 350))
    (lost,) = [path for path in lanes["time"] if path.get("class") == "b-hang"]
    assert re.match(r"M(\d+) .*H(\d+)V", lost.get("d", ""))
    assert {path.get("class") for path in lanes[DECISIONS]} == {"mark t-decided"}
    assert len(lanes["loss"]) == 1


def test_ten_thousand_events_are_a_page_that_opens(tmp_path):
    reason = "layer 12, expert 3 had no token in 20 logged lines in a row, and learns nothing. " * 5
    noise = [event(1010 + i / 30, SPIKED, i, reason=f"{i} {reason}") for i in range(10_000)]
    write_events(tmp_path, DISTURBED + noise)
    page = page_of(tmp_path)
    assert len(page.encode()) < 2_000_000
    assert len(json.loads(Tags(page).inside["data"])["marks"]) == 10_005


def test_the_verb_writes_a_file(run, tmp_path, capsys):
    main(["timeline", str(run), f"--output={tmp_path / 'run.html'}"])
    assert (tmp_path / "run.html").read_text() == page_of(run)
    assert f"{tmp_path / 'run.html'}: " in capsys.readouterr().out
    write_events(tmp_path / "early", [event(10, "failed", 0, reason="no corpus")])
    with pytest.raises(ValueError, match="no event says that the run began its steps"):
        main(["timeline", str(tmp_path / "early"), f"--output={tmp_path / 'early.html'}"])
    assert not (tmp_path / "early.html").exists()


def test_a_run_that_goes_on_and_has_no_metrics_is_shown(tmp_path):
    write_events(tmp_path, FINAL[:1])
    page = page_of(tmp_path)
    assert "going on, or killed" in page
    assert 'class="t-open"' in page


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in node, which is not here")
def test_the_script_zooms_lists_and_tells(run, tmp_path):
    (tmp_path / "run.html").write_text(page_of(run))
    program = pathlib.Path(__file__).with_name("page_in_node.js")
    done = subprocess.run(
        ["node", program, tmp_path / "run.html"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["all"]["view"] == told["back"] == pytest.approx([0, 0, WIDTH, 24])
    # 350 seconds from 00:16:40 on: a whole minute is the first that leaves 110 pixels between two.
    ticks = told["all"]["ticks"]
    assert [text for text, _ in ticks] == ["00:17", "00:18", "00:19", "00:20", "00:21", "00:22"]
    assert float(ticks[0][1].rstrip("%")) == pytest.approx(100 * 20 / 350)
    rows = told["all"]["rows"]
    assert len(rows) == 8
    assert rows[0] == ["1970-01-01 00:16:50", "began", "0", "4 processes, 8 devices"]
    assert rows[2][3] == f"n1, wait: {HOSTILE}"
    assert told["tip"] == "1970-01-01 00:21:00  stalled, step 90: process 0 stands; late: process 3"
    width = WIDTH / 2.718281828
    assert told["wheel"] == pytest.approx([(WIDTH - width) / 2, 0, width, 24])
    assert told["brush"] == pytest.approx([(WIDTH - width) / 2, 0, width / 2, 24])
    assert [row[1] for row in told["filtered"]] == ["an odd kind"]
    assert told["clicked"] == pytest.approx([WIDTH * (140 / 350 - 0.02), 0, WIDTH * 0.04, 24])

"""The timeline page: positions of its marks and curves, and escaping of foreign text."""

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
from synthetic_runs import DISTURBED, FINAL, KILLED, ROW, event, write_events, write_rows

from zaya_jax.aegis.agent.sightings import Sighting, write_sighting
from zaya_jax.aegis.command import main
from zaya_jax.aegis.views.goodput import BUCKETS, DOWN, HANG, LOST, PRODUCTIVE, find_attempts, measure
from zaya_jax.aegis.views.timeline import (
    DECISIONS,
    EVENTS,
    MAX_POINTS,
    MAX_SLICES,
    SIGHTINGS,
    losses_of,
    marks_of,
    slices_of,
    steps_of,
)
from zaya_jax.aegis.views.timeline_page import WIDTH, page_of
from zaya_jax.run_folder.names import AT, DECIDED, SPIKED

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">&lt;\u2028'


class Tags(html.parser.HTMLParser):
    """All tags that a browser would parse, and the text within each."""

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


def test_slices_add_up_to_the_goodput():
    found = dict.fromkeys(BUCKETS, 0.0)
    for each in slices_of(DISTURBED):
        assert sum(each.seconds.values()) == pytest.approx(each.end - each.start)
        for bucket, seconds in each.seconds.items():
            found[bucket] += seconds
    expected = dict(measure(DISTURBED).seconds)
    # Slices divide productive and lost time by their own steps, the goodput by those of an attempt.
    made = [sum(each.pop(bucket) for bucket in (PRODUCTIVE, LOST)) for each in (found, expected)]
    assert made[0] == pytest.approx(made[1])
    assert found == pytest.approx(expected)


def test_repeated_steps_of_a_slice_are_lost():
    of_killed = slices_of(DISTURBED)[2]
    assert (of_killed.start, of_killed.end) == (1030, 1130)
    assert of_killed.seconds == {PRODUCTIVE: pytest.approx(49), LOST: pytest.approx(51)}
    kinds = [set(each.seconds) for each in slices_of(DISTURBED)]
    assert [kind for kind in kinds if DOWN in kind] == [{DOWN}, {DOWN}]
    assert [HANG in kind for kind in kinds].count(True) == 1


def test_slices_and_points_of_long_runs_are_limited(tmp_path):
    words = [
        event(1030 + i, AT, 1 + i, seconds={"start": 10.0, "compile": 20.0, "step": float(i)})
        for i in range(20_000)
    ]
    events = [KILLED[0], *words]
    slices, lives = slices_of(events), find_attempts(events)
    assert MAX_SLICES / 2 < len(slices) <= MAX_SLICES + 2
    assert sum(each.seconds.get(PRODUCTIVE, 0.0) for each in slices) == pytest.approx(19_999)
    (steps,) = steps_of(lives)
    assert len(steps) <= MAX_POINTS + 1
    assert steps[-1] == (21_029.0, 20_000)
    write_rows(
        tmp_path, [ROW | {"step": step, "loss": 9.0 if step == 7777 else 2.0} for step in range(2, 20_000)]
    )
    (losses,) = losses_of(tmp_path, lives)
    assert len(losses) <= MAX_POINTS
    assert [time for time, loss in losses if loss == 9] == [1030 + 7776]


def test_losses_have_the_time_of_the_last_attempt(tmp_path):
    lines = [ROW | {"step": step, "loss": float(step)} for step in (40, 60, 90)]
    strange = [{"step": 70, "kind": "train", "loss": "2"}, {"step": 70, "kind": "validation", "loss": 1.0}]
    write_rows(tmp_path, [*lines, *strange, ROW | {"step": 5000}])
    found = losses_of(tmp_path, find_attempts(DISTURBED))
    assert found == [[(1069.0, 40.0)], [(1185.0, 60.0)], [(1325.0, 90.0)]]


def test_marks_are_all_events_but_progress_reports():
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


def test_foreign_text_is_escaped(run):
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


def test_a_page_loads_nothing(run):
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


def test_drawings_are_valid_svg_within_their_width(run):
    drawings = re.findall(r"<svg .*?</svg>", page_of(run), re.DOTALL)
    lanes = {}
    for drawing in map(xml.etree.ElementTree.fromstring, drawings):
        lanes[drawing.get("data-lane")] = drawing
        for path in drawing.iter("path"):
            assert all(0 <= int(place) <= WIDTH for place in re.findall(r"[MLH](\d+)", path.get("d", "")))
    assert [rect.get("class") for rect in lanes["attempts"]] == ["t-bad", "t-bad", "t-good"]
    # The run lasts from 1000 to 1350; the attempt that stalled began at 1155.
    assert lanes["attempts"][1].get("x") == str(round(WIDTH * 155 / 350))
    (lost,) = [path for path in lanes["time"] if path.get("class") == "b-hang"]
    assert re.match(r"M(\d+) .*H(\d+)V", lost.get("d", ""))
    assert {path.get("class") for path in lanes[DECISIONS]} == {"mark t-decided"}
    assert len(lanes["loss"]) == 1


def test_pages_with_ten_thousand_events_are_small(tmp_path):
    reason = "layer 12, expert 3 had no token in 20 logged lines in a row, and learns nothing. " * 5
    noise = [event(1010 + i / 30, SPIKED, i, reason=f"{i} {reason}") for i in range(10_000)]
    write_events(tmp_path, DISTURBED + noise)
    page = page_of(tmp_path)
    assert len(page.encode()) < 2_000_000
    assert len(json.loads(Tags(page).inside["data"])["marks"]) == 10_005


def test_timeline_command(run, tmp_path, capsys):
    main(["timeline", str(run), f"--output={tmp_path / 'run.html'}"])
    assert (tmp_path / "run.html").read_text() == page_of(run)
    assert f"{tmp_path / 'run.html'}: " in capsys.readouterr().out
    write_events(tmp_path / "early", [event(10, "failed", 0, reason="no corpus")])
    with pytest.raises(ValueError, match="the run has no event of its first step"):
        main(["timeline", str(tmp_path / "early"), f"--output={tmp_path / 'early.html'}"])
    assert not (tmp_path / "early.html").exists()


def test_a_running_run_without_metrics(tmp_path):
    write_events(tmp_path, FINAL[:1])
    page = page_of(tmp_path)
    assert "running, or killed" in page
    assert 'class="t-open"' in page


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in node, which is not here")
def test_the_script_zooms_lists_and_shows_tooltips(run, tmp_path):
    (tmp_path / "run.html").write_text(page_of(run))
    program = pathlib.Path(__file__).with_name("page_in_node.js")
    done = subprocess.run(
        ["node", program, tmp_path / "run.html"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    page = json.loads(done.stdout)
    assert page["all"]["view"] == page["back"] == pytest.approx([0, 0, WIDTH, 24])
    # 350 seconds from 00:16:40 on: a whole minute is the first that leaves 110 pixels between two.
    ticks = page["all"]["ticks"]
    assert [text for text, _ in ticks] == ["00:17", "00:18", "00:19", "00:20", "00:21", "00:22"]
    assert float(ticks[0][1].rstrip("%")) == pytest.approx(100 * 20 / 350)
    rows = page["all"]["rows"]
    assert len(rows) == 8
    assert rows[0] == ["1970-01-01 00:16:50", "began", "0", "4 processes, 8 devices"]
    assert rows[2][3] == f"n1, wait: {HOSTILE}"
    assert page["tip"] == "1970-01-01 00:21:00  stalled, step 90: process 0 is stalled; late: process 3"
    width = WIDTH / 2.718281828
    assert page["wheel"] == pytest.approx([(WIDTH - width) / 2, 0, width, 24])
    assert page["brush"] == pytest.approx([(WIDTH - width) / 2, 0, width / 2, 24])
    assert [row[1] for row in page["filtered"]] == ["an odd kind"]
    assert page["clicked"] == pytest.approx([WIDTH * (140 / 350 - 0.02), 0, WIDTH * 0.04, 24])

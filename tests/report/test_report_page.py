"""The page of runs loads no other file, escapes the contents of runs, and errors are one sentence."""

import base64
import hashlib
import html.parser
import json
import pathlib
import re
import shutil
import subprocess

import pytest
from small_folders import BEGIN, CONFIG, END, train_row, write_lines, write_run

from zaya_jax import cli
from zaya_jax.report.command import main
from zaya_jax.report.page import MAX_TEXTS, page_of
from zaya_jax.report.run_record import read_run

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">&lt;\u2028\ud800'
VOID = {"meta", "input", "rect"}
"""Elements that have no end, or end themselves."""
LOOSE = {"th", "td", "tr", "tbody", "thead"}
"""Elements whose end tag HTML lets one omit."""


class Tags(html.parser.HTMLParser):
    """Parses all tags as a browser does, and the text within each; each is closed where it must be."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.inside, self.texts, self._open, self._newest = [], {}, [], [], ""
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._newest = dict(attrs).get("id") or tag
        if tag not in VOID | LOOSE:
            self._open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID | LOOSE:
            assert self._open.pop() == tag

    def handle_data(self, data):
        self.inside.setdefault(self._newest, data)
        self.texts.append(data)

    def with_class(self, name):
        return [given for _, given in self.tags if name in (given.get("class") or "").split()]


def page(*folders):
    return page_of([read_run(folder) for folder in folders])


@pytest.fixture
def runs(tmp_path):
    texts = [{"step": 50, "text": "old"}, {"step": 50, "text": "print('a < b')"}, {"step": "x", "text": "no"}]
    first = write_run(tmp_path / "first", texts=texts)
    config = CONFIG | {"optimizer": {"learning_rate": 0.25, "name": "muon"}}
    second = write_run(tmp_path / "second", config=config, events=(BEGIN | {"user": "bob"}, END))
    return first, second


def test_the_page_of_two_runs_has_their_parts(runs):
    text = page(*runs)
    result = Tags(text)
    assert [chip["data-run"] for chip in result.with_class("chip")] == ["0", "1"]
    columns = [given["data-column"] for given in result.with_class("chart")]
    assert columns == ["loss", "learning_rate", "gradient_norm"]
    headings = [text for text in result.texts if text in ("Load of experts", "Samples", "Time")]
    assert headings == ["Load of experts", "Time", "Samples"]
    assert "print('a < b')" in result.texts
    assert not {"old", "no"} & set(result.texts)
    for expected in (
        "optimizer.learning_rate",
        "0.5",
        "0.25",
        "ada on n1",
        "bob on n1",
        "32 x MI300X, processes: 4",
    ):
        assert expected in result.texts
    assert "jax 0.10.2, jaxlib 0.10.1" in result.texts
    assert [run["name"] for run in json.loads(result.inside["data"])["runs"]] == list(map(str, runs))


def test_the_table_of_differences_has_the_fields_that_differ(runs):
    text = page(*runs)
    (table,) = re.findall(r"<h2>Configs</h2><div[^>]*>(<table.*?</table>)", text)
    assert re.findall(r"<tr><td>([^<]*)", table) == ["optimizer.learning_rate"]
    assert "The configs are identical." in page(runs[0], shutil.copytree(runs[0], runs[0] / "copy"))


def test_routers_are_drawn_where_a_run_has_them(tmp_path):
    lines = [
        train_row(1, 2.0, router_entropy=1.0),
        '{"step":1,"kind":"router","counts":[[1,2]],"entropy":[0.5]}',
    ]
    with_rows = write_run(tmp_path / "a", lines=lines)
    without = write_run(tmp_path / "b", lines=lines[:1])
    result = Tags(page(with_rows, without))
    assert [given["data-run"] for given in result.with_class("maps")] == ["0"]
    assert any("has no router rows" in text for text in result.texts)


def test_contents_of_runs_are_escaped(tmp_path):
    folder = write_run(
        tmp_path / "<b onclick=alert(1)>",
        lines=[train_row(1, 2.0, HOSTILE, **{HOSTILE: 1.0}), train_row(2, 2.0, "x")],
        config={HOSTILE: HOSTILE, "phases": [{"name": HOSTILE, "steps": 1}]},
        events=(BEGIN | {"user": HOSTILE, "versions": {HOSTILE: HOSTILE}}, END),
        texts=[{"step": 1, "text": HOSTILE}],
    )
    text = page(folder)
    result = Tags(text)
    assert [given for tag, given in result.tags if tag == "script"] == [
        {"type": "application/json", "id": "data"},
        {},
    ]
    assert not {"img", "b onclick=alert(1)"} & {tag for tag, _ in result.tags}
    written = HOSTILE.encode(errors="replace").decode()
    assert written in [given.get("data-column") for given in result.with_class("chart")]
    assert written in result.texts
    data = json.loads(result.inside["data"])
    assert data["runs"][0]["phases"][0] == [written, 1]
    assert data["runs"][0]["name"] == str(folder)


def test_the_page_loads_no_other_file(runs):
    text = page(*runs)
    result = Tags(text)
    attributes = {name for _, given in result.tags for name in given}
    assert not attributes & {"src", "href", "action", "style", "srcset", "onload", "onclick", "onerror"}
    (policy,) = [given["content"] for tag, given in result.tags if tag == "meta" and "http-equiv" in given]
    assert policy.startswith("default-src 'none'")
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
        assert "url(" not in content
        assert "innerHTML" not in content


def test_the_first_and_the_last_of_many_samples_are_shown(tmp_path):
    texts = [{"step": step, "text": f"text {step}"} for step in range(100)]
    shown = [
        text
        for text in Tags(page(write_run(tmp_path / "run", texts=texts))).texts
        if re.fullmatch(r"text \d+", text)
    ]
    assert len(shown) == MAX_TEXTS
    assert (shown[0], shown[-1]) == ("text 0", "text 99")


def test_a_run_without_rows_is_shown(tmp_path):
    folder = write_run(tmp_path / "run", lines=None, events=())
    result = Tags(page(folder))
    assert (
        f"{folder / 'metrics.jsonl'} has no training row yet; a run writes one every train.log_every steps"
        in (result.texts)
    )
    assert "not started" in result.texts
    assert result.with_class("chart") == []


def test_parts_that_are_damaged_are_named(tmp_path):
    folder = write_run(tmp_path / "run", config=None)
    (folder / "config.json").write_text("{")
    (folder / "changes.jsonl").write_text("3\n")
    (folder / "events.jsonl").write_bytes(
        b'\xff\n{"time": 1e300, "event": "began", "step": 0, "seconds": {}, "versions": {}}\n'
    )
    run = read_run(folder)
    assert [note.split(" ")[0] for note in run.notes] == [
        f"{folder}/config.json",
        f"{folder}/changes.jsonl:1",
        f"{folder}/metrics.jsonl",
    ]
    assert page_of([run])


def test_config_changes_during_the_run_are_a_table(tmp_path):
    folder = write_run(tmp_path / "run")
    change = {
        "step": 20,
        "written": "2026-11-24T00:00:00+00:00",
        "has_left_its_course": True,
        "fields": {"optimizer.learning_rate": [0.5, 0.125]},
    }
    write_lines(folder / "changes.jsonl", [change])
    row = f"<tr><td>{folder}<td>20<td>optimizer.learning_rate<td>0.5<td>0.125</table>"
    assert row in page(folder)


def test_the_command_writes_a_file_and_reports_what_is_missing(runs, tmp_path, capsys):
    shutil.rmtree(runs[1] / "checkpoints", ignore_errors=True)
    (runs[1] / "config.json").unlink()
    main([*map(str, runs), f"--output={tmp_path / 'report.html'}"])
    assert (tmp_path / "report.html").read_text() == page(*runs)
    printed = capsys.readouterr().out
    assert f"{runs[1]} has no config.json" in printed
    assert f"{tmp_path / 'report.html'}: " in printed


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "the following arguments are required: RUN"),
        (
            ["none"],
            "none is not a run folder: the folder does not exist; it must contain one of config.json",
        ),
        (["."], ". is not a run folder: it has none of config.json, metrics.jsonl, events.jsonl"),
        (["first", "first"], "first is named 2 times; each run must be named once"),
        (["first", "--outptu=x"], 'did you mean "--output"?'),
        (["first", "--output=none/report.html"], "none/report.html.partial: No such file or directory"),
    ],
)
def test_invalid_arguments_are_reported_in_one_line(runs, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(runs[0].parent)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["report", *words])
    assert leaving.value.code == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert len(printed.splitlines()) == 1


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in node, which is not here")
def test_the_script_draws_curves_shows_values_and_hides_runs(tmp_path):
    lines = [
        *(train_row(10 * n, 4.0 - n, "early" if n < 3 else "late", load_entropy=1.0) for n in range(1, 4)),
        '{"step": 30, "kind": "validation", "loss": 1.5}',
        '{"step":10,"kind":"router","counts":[[30,10,0]],"entropy":[1.0]}',
        '{"step":30,"kind":"router","counts":[[20,0,20]],"entropy":[0.5]}',
    ]
    events = (BEGIN, {"time": BEGIN["time"] + 5, "event": "spiked", "step": 20, "reason": "it jumped"}, END)
    folders = [write_run(tmp_path / name, lines=lines, events=events) for name in ("a", "b")]
    (tmp_path / "report.html").write_text(page(*folders))
    program = pathlib.Path(__file__).with_name("report_in_node.js")
    done = subprocess.run(
        ["node", program, tmp_path / "report.html"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    a, b = map(str, folders)
    # Smoothed by 0.6 without a bias: (0.4 * 2 + 0.24 * 3) / 0.64.
    assert values["pointed"] == "\n".join(
        f"{name}, step 20: 2, smoothed 2.375\n{name}, step 20, spiked: it jumped" for name in (a, b)
    )
    assert values["hidden"] == f"{b}, step 30: 1, smoothed 1.673\n{b}, held-out: 1.5"
    assert values["tokens"] == f"{b}, step 10: 3, smoothed 3"
    assert {"early", "late"} <= set(values["written"])
    assert values["first_load"] == "step 10\nlayer 0, expert 0: 1.50 of an even share, 75.00 % of the tokens"
    # Half of the tokens skip, and one of two experts has all others.
    assert values["second_load"] == "step 30\nlayer 0, expert 0: 2.00 of an even share, 50.00 % of the tokens"
    assert values["skipped"] == "step 30\nlayer 0: 50.00 % of the tokens skip"
    assert values["entropy"] == "step 30\nlayer 0: 0.5 nats; 0.5 to 1 in this run"
    assert values["zoomed"] == [1000, 2000]
    assert values["whole"] is None

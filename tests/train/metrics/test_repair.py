"""Metric files with lost disk pages: damage is reported on resume, and no intact row is dropped."""

import json

import pytest

from zaya_jax.report.metrics_file import read_metrics as read_table
from zaya_jax.run_folder.names import METRICS_FILE
from zaya_jax.train.metrics.files import MetricsWriter, read_metrics
from zaya_jax.train.metrics.repair import repair_rows

ROWS = [
    json.dumps({"step": s, "kind": "train", "loss": 1 / s, "rate": 0.5}).encode() + b"\n"
    for s in range(1, 301)
]
WHOLE = b"".join(ROWS)
PAGE = 4096


def zeroed(start, end):
    return WHOLE[:start] + bytes(end - start) + WHOLE[end:]


def steps_outside(start, end):
    """Returns rows without damaged bytes, by their positions."""
    kept, place = [], 0
    for step, row in enumerate(ROWS, start=1):
        line = place, place + len(row) - 1  # its end may be lost: the row is whole without it
        if line[1] <= start or line[0] >= end:
            kept.append(step)
        place += len(row)
    return kept


def border(step):
    return sum(map(len, ROWS[:step]))


SPANS = {
    "a page in the middle": (PAGE, 2 * PAGE),
    "the first page": (0, PAGE),
    "the last page": (len(WHOLE) - len(WHOLE) % PAGE, len(WHOLE)),
    "two pages": (PAGE, 3 * PAGE),
    "whole rows": (border(10), border(20)),
    "up to the begin of a row": (border(9) + 5, border(20)),
    "from the end of a row": (border(10) - 1, border(20) + 7),
    "one line end": (border(10) - 1, border(10)),
    "one digit": (border(10) + 9, border(10) + 10),
    "everything": (0, len(WHOLE)),
}


@pytest.mark.parametrize("name", SPANS)
def test_a_zeroed_page_is_reported_and_intact_rows_stay(name, tmp_path, caplog):
    start, end = SPANS[name]
    path = tmp_path / METRICS_FILE
    path.write_bytes(zeroed(start, end))
    with MetricsWriter(tmp_path, first_step=300):
        pass
    kept = steps_outside(start, end)
    assert [row["step"] for row in read_metrics(tmp_path, "train")] == kept
    assert path.read_bytes() == b"".join(ROWS[step - 1] for step in kept)
    (record,) = caplog.records
    before = max((step for step in kept if border(step - 1) < start), default=None)
    after = min((step for step in kept if border(step - 1) >= end), default=None)
    place = f"between steps {before} and {after}"
    if before is None:
        place = "all of it" if after is None else "before all rows"
    elif after is None:
        place = f"after step {before}"
    assert f"{path} is damaged: " in record.getMessage()
    assert f", {place}, are not rows of metrics" in record.getMessage()


def test_rows_that_were_appended_after_lost_bytes_stay(tmp_path, caplog):
    """A file system lost the last page of a file, and a process appended to it."""
    path = tmp_path / METRICS_FILE
    path.write_bytes(b"".join(ROWS[:10]) + ROWS[10][:20] + bytes(100) + b"".join(ROWS[11:20]))
    assert read_table(tmp_path).train.steps.tolist() == [
        *range(1, 11),
        *range(13, 21),
    ]  # until it is repaired
    repair_rows(path, until=15)
    assert path.read_bytes() == b"".join(ROWS[:10] + ROWS[11:15])
    assert "between steps 10 and 12" in caplog.text


def test_other_bytes_are_damage_too(tmp_path, caplog):
    path = tmp_path / METRICS_FILE
    garbage = bytes(range(1, 256)) * 4
    path.write_bytes(b"".join(ROWS[:10]) + garbage + b"\n" + b"".join(ROWS[10:20]))
    repair_rows(path, until=300)
    assert path.read_bytes() == b"".join(ROWS[:20])
    assert f"bytes {border(10)} to {border(10) + len(garbage) - 1}, between steps 10 and 11" in caplog.text


@pytest.mark.parametrize("cut", [0, 1, 2, 30])
def test_an_incomplete_last_row_is_no_damage(cut, tmp_path, caplog):
    path = tmp_path / METRICS_FILE
    path.write_bytes(WHOLE[: border(20) + cut])
    repair_rows(path, until=20)
    assert path.read_bytes() == b"".join(ROWS[:20])
    assert not caplog.records


def test_an_intact_file_is_not_rewritten(tmp_path):
    path = tmp_path / METRICS_FILE
    path.write_bytes(WHOLE)
    path.chmod(0o400)
    before = path.stat()
    repair_rows(path, until=300)
    assert path.stat() == before


def test_a_report_counts_lost_bytes_as_damage(tmp_path):
    (tmp_path / METRICS_FILE).write_bytes(zeroed(border(10), border(12)))
    actual = read_table(tmp_path)
    assert actual.num_damaged == 1
    assert actual.train.steps.tolist() == [*range(1, 11), *range(13, 301)]


def test_rows_of_later_steps_are_dropped(tmp_path):
    rows = [{"step": step, "kind": kind} for step in (1, 2, 3) for kind in ("train", "validation")]
    path = tmp_path / METRICS_FILE
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 2, "ki')
    repair_rows(path, until=2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows[:4]
    repair_rows(path, until=0)
    assert path.read_text() == ""
    repair_rows(tmp_path / "none", until=0)
    assert [p.name for p in tmp_path.iterdir()] == [METRICS_FILE]

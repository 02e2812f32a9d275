"""NaN and infinities are strings in JSON files, as in the JSON mapping of Protocol Buffers."""

import json
import math

import numpy as np
import pytest
from google.protobuf import json_format, wrappers_pb2

from zaya_jax.files.json_files import dump_json, restore_numbers
from zaya_jax.report.metrics_file import read_metrics as read_table
from zaya_jax.run_folder.events import append_line, parse_row, parse_rows
from zaya_jax.run_folder.names import METRICS_FILE, ROUTERS_FILE
from zaya_jax.train.metrics.files import MetricsWriter, read_metrics


def strict(text):
    """Parses JSON as defined by RFC 8259: a bare NaN or Infinity is an error."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


VALUES = [
    0.0,
    -1.5,
    1e308,
    3,
    True,
    None,
    "NaN",
    math.nan,
    math.inf,
    -math.inf,
    np.float64("nan"),
    np.float64("inf"),
]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_are_written_as_protobuf_does(number):
    assert dump_json(number) == json_format.MessageToJson(wrappers_pb2.DoubleValue(value=number))
    read = json_format.Parse(dump_json(number), wrappers_pb2.DoubleValue()).value
    np.testing.assert_equal(read, number)


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("nest", [lambda x: x, lambda x: [1, x], lambda x: {"a": {"b": (x, 2.5)}}])
def test_round_trip(value, nest):
    read = restore_numbers(strict(dump_json(nest(value))))
    expected = math.nan if value == "NaN" else value
    np.testing.assert_equal(read, json.loads(json.dumps(nest(expected))))


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 2.5])
def test_metrics_have_no_bare_nan_and_read_back(loss, tmp_path):
    with MetricsWriter(tmp_path, first_step=0) as writer:
        writer.write(1, "train", {"loss": loss, "rate": 0.5}, phase="NaN")
        writer.write(2, "train", {"loss": 1.0, "rate": 0.5}, phase="NaN")
        writer.write_router(1, np.ones((2, 3)), np.array([loss, 1.0]))
    for name in (METRICS_FILE, ROUTERS_FILE):
        assert all(map(strict, (tmp_path / name).read_text().splitlines()))
    rows = read_metrics(tmp_path, "train")
    np.testing.assert_equal(rows[0], {"step": 1, "kind": "train", "phase": "NaN", "loss": loss, "rate": 0.5})
    np.testing.assert_equal(read_metrics(tmp_path, "router")[0]["entropy"], [loss, 1.0])
    table = read_table(tmp_path).train
    np.testing.assert_equal(table.columns["loss"], [loss, 1.0])
    assert table.phases == ("NaN",)


@pytest.mark.parametrize("old", ["NaN", "Infinity", "-Infinity"])
def test_files_with_bare_numbers_stay_readable(old):
    line = f'{{"step": 3, "kind": "train", "loss": {old}, "rate": 0.5}}\n'.encode()
    np.testing.assert_equal((parse_row(line) or {})["loss"], float(old))
    np.testing.assert_equal((parse_rows([line, line])[1] or {})["loss"], float(old))


def test_events_have_no_bare_nan(tmp_path):
    append_line(
        tmp_path / "events.jsonl", {"time": 1.0, "event": "spiked", "loss": math.nan, "far": [math.inf]}
    )
    assert strict((tmp_path / "events.jsonl").read_text())["loss"] == "NaN"

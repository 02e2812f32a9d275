"""The page contains the numbers of a run's rows, and the extremes of thinned rows."""

import json
import math

import numpy as np
import pytest
from small_folders import BEGIN, CONFIG, END, LINES, router_row, train_row, write_run

from zaya_jax.report.charts import MAX_CHARTS, sections_of
from zaya_jax.report.config_fields import MISSING, compare_configs
from zaya_jax.report.content import MAX_PAGE_LOADS, SHARES, bins_that_fit, content_of
from zaya_jax.report.metrics_file import CHUNK_ROWS, MAX_MOMENTS, read_metrics
from zaya_jax.report.run_record import read_run
from zaya_jax.report.summary import HEADERS, summary_of
from zaya_jax.report.thinning import as_short_numbers, bins_of, thin
from zaya_jax.run_folder.events import parse_row, parse_rows
from zaya_jax.run_folder.names import METRICS_FILE, ROUTERS_FILE


def content_by_hand(*runs):
    columns = dict.fromkeys(name for run in runs for name in run.metrics.train.columns)
    content = content_of(runs, sections_of(columns))
    return json.loads(json.dumps(content))["runs"]


def test_the_page_has_the_numbers_of_the_rows(tmp_path):
    (run,) = content_by_hand(read_run(write_run(tmp_path / "run")))
    assert run["train"]["steps"] == [10, 20, 30, 40, 50]
    assert run["train"]["tokens"] == [1000, 2000, 3000, 4000, 5000]
    assert run["train"]["curves"] == {
        "loss": [[4, 3, 2.5, None, 2]],
        "learning_rate": [[0.5, 0.25, 0.125, 0.0625, 0.0625]],
        "gradient_norm": [[None, None, None, None, 7]],  # "1" is a word
    }
    assert run["held_out"]["steps"] == [20, 50]
    assert run["held_out"]["tokens"] == [2000, 5000]
    assert run["held_out"]["curves"] == {"loss": [[3.5, 2.5]]}
    assert run["phases"] == [["early", 30], ["late", 50]]
    assert run["tasks"] == {"steps": [], "tokens": None, "curves": {}}


def test_tasks_have_their_own_charts(tmp_path):
    """A task may have the name of a training metric, and is evaluated at other steps."""
    lines = [*(train_row(step, 2.0) for step in (1, 2, 3)), *(
        json.dumps({"step": step, "kind": "tasks", "loss": value, "my_task/acc": value / 8})
        for step, value in ((1, 2.0), (3, 4.0))
    )]  # fmt: skip
    run = read_run(write_run(tmp_path / "run", lines=lines))
    columns = [*run.metrics.train.columns, *run.metrics.tasks.columns]
    result = next(section for section in sections_of(columns) if section.title == "Tasks")
    assert [(chart.column, chart.title) for chart in result.charts] == [
        ("tasks/loss", "loss"),
        ("tasks/my_task/acc", "my_task/acc"),
    ]
    (content,) = json.loads(json.dumps(content_of([run], sections_of(columns))))["runs"]
    assert content["tasks"]["steps"] == [1, 3]
    assert content["tasks"]["curves"] == {"tasks/loss": [[2, 4]], "tasks/my_task/acc": [[0.25, 0.5]]}
    assert content["train"]["curves"]["loss"] == [[2, 2, 2]]


def test_loads_are_shares_of_a_layers_tokens(tmp_path):
    (run,) = content_by_hand(read_run(write_run(tmp_path / "run")))
    router = run["router"]
    assert (router["steps"], router["tokens"]) == ([10, 40], [1000, 4000])
    quarter = SHARES // 4
    first, last = router["shares"]
    assert first == [[3 * quarter, quarter, 0], [0, 2 * quarter, 2 * quarter]]
    assert last == [[quarter, quarter, 2 * quarter], [0, 0, 4 * quarter]]
    assert router["entropy"] == [[1, 0.5], [0.25, 0.125]]


def test_events_have_their_steps(tmp_path):
    went_back = {
        "time": 1_000_000_050.0,
        "event": "went back",
        "step": 30,
        "reason": "a spike",
        "seconds": {},
    }
    again = BEGIN | {"time": 1_000_000_060.0, "step": 20}
    (run,) = content_by_hand(read_run(write_run(tmp_path / "run", events=(BEGIN, went_back, again, END))))
    assert run["marks"] == [[30, "went back: a spike"], [20, "began: 4 processes, 32 devices"]]


def test_many_runs_show_fewer_moments(tmp_path):
    lines = [train_row(1, 2.0), *(router_row(n, [[1] * 21] * 50, [0.5] * 50) for n in range(1, 101))]
    runs = [read_run(write_run(tmp_path / name, lines=lines)) for name in "abcdefgh"]
    steps = [run["router"]["steps"] for run in content_by_hand(*runs)]
    assert len(steps[0]) == MAX_PAGE_LOADS // 8 // (50 * 21)
    assert (steps[0][0], steps[0][-1]) == (1, 100)
    assert len(content_by_hand(runs[0])[0]["router"]["steps"]) == 100


def test_rows_after_a_damaged_line_are_read_and_the_damage_is_reported(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    assert run.metrics.num_damaged == 1  # the half line at the end is none
    assert list(run.notes) == [f"{tmp_path / 'run' / METRICS_FILE} has 1 damaged lines, which are ignored"]
    # Only held-out rows have bits per byte.
    assert run.metrics.held_out.columns["bits_per_byte"].tolist() == [1.75, 1.25]


def test_rows_at_once_are_those_of_each_line():
    lines = [line.encode() for line in LINES if "\ufffd" not in line]
    for odd in (
        [],
        [b"[" * 100_000],
        [b"{}", b"3"],
        [b'{"step": 1', b'"kind": "a"}'],
        [b"", b'{"a":1},{"a":1}'],
    ):
        result = parse_rows([*lines, *odd])
        assert repr(result) == repr([parse_row(line) for line in [*lines, *odd]])


def test_pieces_of_a_file_are_one_table(tmp_path):
    """Columns that start late, rows with other names, and a chunk boundary in the middle."""
    count = 2 * CHUNK_ROWS + 7
    rows = [train_row(n + 1, float(n), **({"late": n} if n > CHUNK_ROWS + 2 else {})) for n in range(count)]
    (tmp_path / METRICS_FILE).write_text("\n".join([*rows, ""]))
    table = read_metrics(tmp_path).train
    assert table.steps.tolist() == list(range(1, count + 1))
    assert table.columns["loss"].tolist() == list(map(float, range(count)))
    assert np.isnan(table.columns["late"][: CHUNK_ROWS + 3]).all()
    assert table.columns["late"][CHUNK_ROWS + 3 :].tolist() == list(range(CHUNK_ROWS + 3, count))


@pytest.mark.parametrize(
    "value", ["3", None, [1], {"a": 1}, True, 10**400, float("inf")], ids=lambda value: str(value)[:5]
)
def test_values_that_are_not_numbers_are_missing(tmp_path, value):
    (tmp_path / METRICS_FILE).write_text(
        "\n".join([train_row(1, 2.0, odd=1.5), train_row(2, 3.0, odd=value), ""])
    )
    table = read_metrics(tmp_path).train
    assert table.columns["loss"].tolist() == [2, 3]
    if value is True:
        assert table.columns["odd"].tolist() == [1.5, 1.0]
    else:
        assert table.columns["odd"][0] == 1.5
        assert not np.isfinite(table.columns["odd"][1])


def test_invalid_router_rows_are_ignored(tmp_path):
    odd = [
        router_row(1, [[1, 2], [3]], [0.5, 0.5]),
        router_row(2, [[1, "2"]], [0.5]),
        router_row(3, [[1, 2]], [0.5, 0.5]),
        router_row(4, [[1, 2]], [float("nan")]),
        router_row(5, [[1]], [0.5]),
        '{"step":6,"kind":"router"}',
        '{"step":7,"kind":"router","counts":[[1,',
    ]
    good = [router_row(n, [[n, 1]], [0.5]) for n in (8, 9)]
    (tmp_path / ROUTERS_FILE).write_text("\n".join([*odd, *good, ""]))
    router = read_metrics(tmp_path).router
    assert router is not None
    assert router.steps_M.tolist() == [8, 9]
    assert router.counts_MLX.tolist() == [[[8, 1]], [[9, 1]]]
    (tmp_path / ROUTERS_FILE).write_text("\n".join([*odd, ""]))
    assert read_metrics(tmp_path).router is None


def test_the_first_and_the_last_of_many_moments_are_shown(tmp_path):
    rows = [router_row(n, [[n, 1]], [0.5]) for n in range(1, 1001)]
    (tmp_path / ROUTERS_FILE).write_text("\n".join([*rows, ""]))
    router = read_metrics(tmp_path).router
    assert router is not None
    assert len(router.steps_M) == MAX_MOMENTS
    assert (router.steps_M[0], router.steps_M[-1]) == (1, 1000)
    assert set(np.diff(router.steps_M).tolist()) <= {5, 6}


@pytest.mark.parametrize("num_rows", [1, 799, 800, 801, 10_001])
def test_thinning_keeps_extremes_and_means(num_rows):
    numbers = np.random.default_rng(num_rows)
    values = numbers.standard_normal(num_rows)
    values[numbers.random(num_rows) < 0.3] = np.nan
    values[0] = 1.0
    bins = bins_of(num_rows, 800)
    curve = thin(values, bins)
    assert len(bins.starts) <= 800
    assert (np.nanmin(curve.low), np.nanmax(curve.high)) == (np.nanmin(values), np.nanmax(values))
    for start, end, low, mean, high in zip(
        bins.starts, bins.ends, curve.low, curve.mean, curve.high, strict=True
    ):
        part = [value for value in values[start : end + 1].tolist() if not math.isnan(value)]
        if not part:
            assert np.isnan([low, mean, high]).all()
        else:
            assert (low, high) == (min(part), max(part))
            assert mean == pytest.approx(sum(part) / len(part))
    assert curve.is_exact == (num_rows <= 800)


def test_infinities_are_no_extremes():
    curve = thin(np.array([1.0, np.inf, -np.inf, 3.0, np.nan, np.inf]), bins_of(6, 2))
    assert as_short_numbers(curve.low) == [1, 3]
    assert as_short_numbers(curve.high) == [1, 3]


def test_numbers_are_short():
    values = np.array([2.3456789, 4096.0, 1.23456789e-7, 123456789.0, np.nan, np.inf, 0.0])
    assert json.dumps(as_short_numbers(values)) == "[2.3457, 4096, 1.2346e-07, 123460000, null, null, 0]"


def test_more_curves_have_fewer_bins():
    assert bins_that_fit(num_curves=30) == 800
    assert 3 * 900 * bins_that_fit(num_curves=900) <= 250_000
    assert bins_that_fit(num_curves=10**6) == 50


def test_each_column_has_one_chart():
    columns = [
        "tokens",
        "loss",
        "update_norm/router",
        "gradient_norm",
        "gradient_norm/router",
        "skipped",
        "mine",
    ]
    sections = sections_of(columns)
    assert [chart.column for section in sections for chart in section.charts] == [
        "loss",
        "gradient_norm",
        "gradient_norm/router",
        "update_norm/router",
        "skipped",
        "mine",
    ]
    assert sections[-1].title == "Other numbers"


def test_a_custom_program_may_log_any_number_of_columns():
    (section,) = sections_of(f"mine_too/my_name_{n}" for n in range(MAX_CHARTS + 5))
    assert (len(section.charts), section.num_omitted) == (MAX_CHARTS, 5)
    assert section.charts[0].title == "mine too/my_name_0"


def test_configs_are_compared_field_by_field():
    other = CONFIG | {
        "run_folder": "there",
        "optimizer": {"learning_rate": 0.25, "name": "muon"},
        "phases": [{"name": "decay", "steps": 5, "data": {}}],
    }
    fields = {field.name: field for field in compare_configs([CONFIG, other])}
    assert [name for name, field in fields.items() if field.differs] == [
        "optimizer.learning_rate",
        "phases",
        "phases.decay.steps",
    ]
    assert fields["optimizer.learning_rate"].values == ("0.5", "0.25")
    assert fields["phases.decay.steps"].values == (MISSING, "5")
    assert not any(field.differs for field in compare_configs([CONFIG]))


def test_the_summary_of_a_run(tmp_path):
    printed = dict(zip(HEADERS, summary_of(read_run(write_run(tmp_path / "run"))), strict=True))
    assert printed["steps"] == "50"
    assert printed["loss"] == f"{(4 + 3 + 2.5 + 2) / 4:.4f}"
    assert (printed["held-out loss"], printed["held-out bits per byte"]) == ("2.5000", "1.2500")
    assert (printed["goodput"], printed["end"], printed["MFU"]) == ("90.0%", "finished", MISSING)

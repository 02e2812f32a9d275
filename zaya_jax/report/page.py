"""The HTML page of a report: text as HTML, and charts as JSON data that its scripts draw."""

import datetime
import html
import json
import pathlib
from collections.abc import Iterable, Sequence

from zaya_jax.aegis.views.goodput_bar import goodput_bar, goodput_legend
from zaya_jax.html_page.frame import make_page
from zaya_jax.report.charts import Chart, Section, sections_of
from zaya_jax.report.config_fields import FieldValues, compare_configs
from zaya_jax.report.content import content_of
from zaya_jax.report.run_record import Origin, RunRecord, Sample
from zaya_jax.report.summary import HEADERS, summary_of

MAX_TEXTS = 30
"""Maximum number of samples per run: the first and the last ones."""
MAX_TEXT_LENGTH, MAX_VALUE_LENGTH = 4000, 200
LAST_SECOND = 2**32
"""Times beyond this are shown as numbers: a clock may be wrong by any amount."""
NUM_COLORS = 8
"""Number of colors in `report.css`; further runs have dashed lines."""
_HERE = pathlib.Path(__file__).parent
STYLES = (_HERE / "report.css",)
SCRIPTS = tuple(_HERE / name for name in ("curves.js", "heat_maps.js", "report.js"))
_CONTROLS = """<label>x axis <select id="axis"><option value="steps">steps</option>
<option value="tokens">tokens</option></select></label>
<label>smoothing <input id="smoothing" type="range" min="0" max="0.99" step="0.01" value="0.6"></label>"""
_HINTS = """<p class="hint">Hover: read values. Drag: zoom into a range. Double click: reset the zoom. Click a
run: hide it. Dashed lines: phases. Arrows: events of a run. Pale: unsmoothed rows, or the range from the
minimum to the maximum of the rows that a point stands for.</p>
<noscript><p>The curves need JavaScript.</p></noscript>"""
_ROUTER_HINT = """<p class="hint">Load of each expert by layer over time, relative to an even share of the
tokens that are not skipped: <span class="scale" id="load-scale"></span>. The separate lowest row is the share
of skipped tokens. The last picture is the entropy of each layer's router.</p>"""


def page_of(runs: Sequence[RunRecord]) -> str:
    """Returns the page of one or more runs."""
    tables = [table for run in runs for table in (run.metrics.train, run.metrics.tasks)]
    # A dict keeps the order in which columns first appear.
    names = dict.fromkeys(name for table in tables for name in table.columns)
    sections = sections_of(names)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    parts = (
        f"<h1>{html.escape(title)}</h1>",
        _controls(runs),
        _HINTS,
        _notes(runs),
        _table(("run", *HEADERS), [(run.name, *summary_of(run)) for run in runs], "summary"),
        *map(_section, sections),
        _heat_maps(runs),
        _time(runs),
        _texts(runs),
        _configs(runs),
        _origins(runs),
    )
    return make_page(title, "\n".join(parts), data=content_of(runs, sections), styles=STYLES, scripts=SCRIPTS)


def _controls(runs: Sequence[RunRecord]) -> str:
    chips = "".join(
        f'<button type="button" class="chip c-{n % NUM_COLORS}" data-run="{n}" aria-pressed="true">'
        f"{html.escape(run.name)}</button>"
        for n, run in enumerate(runs)
    )
    return f'<div id="controls">{chips}{_CONTROLS}</div>'


def _notes(runs: Sequence[RunRecord]) -> str:
    return "".join(f'<p class="note">{html.escape(note)}</p>' for run in runs for note in run.notes)


def _section(section: Section) -> str:
    charts = "".join(map(_chart, section.charts))
    omitted = f'<p class="hint">{section.num_omitted:,} more columns are not drawn.</p>'
    pictures = f'<h2>{section.title}</h2><div class="charts">{charts}</div>'
    return pictures + (omitted if section.num_omitted else "")


def _chart(chart: Chart) -> str:
    pressed = "true" if chart.is_logarithmic else "false"
    exact = " data-exact" if chart.is_exact else ""
    meaning = f'<span class="hint">{chart.meaning}</span>' if chart.meaning else ""
    return (
        f'<figure class="chart" data-column="{html.escape(chart.column)}"{exact}><figcaption>'
        f'<b>{html.escape(chart.title)}</b> <button type="button" class="log" aria-pressed="{pressed}">log'
        f"</button> {meaning}</figcaption><canvas></canvas></figure>"
    )


def _heat_maps(runs: Sequence[RunRecord]) -> str:
    return _of_runs("Load of experts", runs, [_maps(run, n) for n, run in enumerate(runs)], _ROUTER_HINT)


def _maps(run: RunRecord, number: int) -> str:
    router = run.metrics.router
    if router is None:
        return ""
    first, last, num_moments = router.steps_M[0], router.steps_M[-1], len(router.steps_M)
    steps = f"step {first:,}"
    if num_moments > 1:
        steps = f"steps {first:,} to {last:,}, {num_moments} moments"
    return f'<p class="hint">{steps}</p><div class="maps" data-run="{number}"></div>'


def _run_name(runs: Sequence[RunRecord], number: int) -> str:
    name = html.escape(runs[number].name)
    return f'<h3 class="c-{number % NUM_COLORS}">{name}</h3>' if len(runs) > 1 else ""


def _of_runs(title: str, runs: Sequence[RunRecord], parts: Sequence[str], hint: str = "") -> str:
    """A part of the page with a block for each run that has content; empty if none has."""
    # The number of a run is its place in the scripts' data, also if runs before it have no such block.
    blocks = "".join(
        f'<div class="of-run" data-run="{n}">{_run_name(runs, n)}{part}</div>'
        for n, part in enumerate(parts)
        if part
    )
    # A heading without any block would announce nothing.
    return f"<h2>{title}</h2>{hint}{blocks}" if blocks else ""


def _time(runs: Sequence[RunRecord]) -> str:
    parts = []
    for run in runs:
        goodput = run.goodput
        parts.append(
            ""
            if goodput is None
            else goodput_bar(goodput) + goodput_legend(goodput) + _attempts(goodput.attempts)
        )
    return _of_runs("Time", runs, parts)


def _attempts(attempts: int) -> str:
    return f'<p class="hint">Started {attempts:,} times.</p>' if attempts != 1 else ""


def _texts(runs: Sequence[RunRecord]) -> str:
    return _of_runs("Samples", runs, ["".join(map(_text, _first_and_last(run.texts))) for run in runs])


def _first_and_last(texts: Sequence[Sample]) -> Sequence[Sample]:
    half = MAX_TEXTS // 2
    return texts if len(texts) <= MAX_TEXTS else [*texts[:half], *texts[-half:]]


def _text(text: Sample) -> str:
    return (
        f"<details open><summary>step {text.step:,}</summary>"
        f"<pre>{html.escape(_cut(text.text, MAX_TEXT_LENGTH))}</pre></details>"
    )


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _configs(runs: Sequence[RunRecord]) -> str:
    fields = compare_configs([run.config for run in runs])
    headers = ("field", *(run.name for run in runs))
    different = _table(headers, _field_rows(field for field in fields if field.differs), "fields")
    section = f"<h2>Configs</h2>{different or _no_difference(runs)}{_changes(runs)}"
    every = _table(headers, _field_rows(fields), "fields")
    return f"{section}<details><summary>All {len(fields)} fields</summary>{every}</details>"


def _no_difference(runs: Sequence[RunRecord]) -> str:
    return "<p>The configs are identical.</p>" if len(runs) > 1 else ""


def _field_rows(fields: Iterable[FieldValues]) -> list[tuple[str, ...]]:
    return [(field.name, *(_cut(value, MAX_VALUE_LENGTH) for value in field.values)) for field in fields]


def _changes(runs: Sequence[RunRecord]) -> str:
    rows = [
        (
            run.name,
            f"{change.step:,}",
            str(name),
            *(_cut(json.dumps(value), MAX_VALUE_LENGTH) for value in pair),
        )
        for run in runs
        for change in run.changes
        for name, pair in change.fields.items()
        # Other values are from a damaged file.
        if isinstance(pair, list) and len(pair) == 2
    ]
    table = _table(("run", "from step", "field", "before", "then"), rows, "fields")
    return f"<h3>Changed during the run</h3>{table}" if table else ""


def _origins(runs: Sequence[RunRecord]) -> str:
    rows = [(run.name, *_origin(origin)) for run in runs for origin in run.origins]
    table = _table(("run", "started, UTC", "from step", "user", "devices", "versions"), rows, "origins")
    return f"<h2>Processes and versions</h2>{table}" if table else ""


def _origin(origin: Origin) -> tuple[str, ...]:
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    return (_when(origin.began), f"{origin.step:,}", origin.who, origin.devices, versions)


def _when(seconds: float) -> str:
    if not 0 <= seconds < LAST_SECOND:
        return f"{seconds:.0f}"
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S}"


def _table(headers: Iterable[str], rows: Sequence[Sequence[str]], name: str) -> str:
    """A table that scrolls horizontally on a narrow screen; empty without rows."""
    if not rows:
        return ""
    # HTML does not need the end tags of cells, rows, heads and bodies.
    head = "".join(f"<th>{html.escape(header)}" for header in headers)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}' for cell in row)}" for row in rows)
    return f'<div class="wide"><table class="{name}"><thead><tr>{head}<tbody>{body}</table></div>'

"""The HTML page of a report: text as HTML, and charts as JSON data that its scripts draw."""

import datetime
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from zaya_jax.aegis.views.goodput_bar import goodput_bar, goodput_legend
from zaya_jax.html_page.frame import make_page, render
from zaya_jax.report.charts import sections_of
from zaya_jax.report.config_fields import FieldValues, compare_configs
from zaya_jax.report.content import content_of
from zaya_jax.report.run_record import Origin, RunRecord, Sample
from zaya_jax.report.summary import HEADERS, summary_of

MAX_TEXTS = 30
"""Maximum number of samples per run: the first and the last ones."""
MAX_VALUE_LENGTH = 200
LAST_SECOND = 2**32
"""Times beyond this are shown as numbers: a clock may be wrong by any amount."""
NUM_COLORS = 8
"""Number of colors in `report.css`; further runs have dashed lines."""
_HERE = pathlib.Path(__file__).parent
TEMPLATE = _HERE / "report.html.jinja"
STYLES = (_HERE / "report.css",)
SCRIPTS = tuple(_HERE / name for name in ("curves.js", "heat_maps.js", "report.js"))


def page_of(runs: Sequence[RunRecord]) -> str:
    """Returns the page of one or more runs."""
    tables = [table for run in runs for table in (run.metrics.train, run.metrics.tasks)]
    # A dict keeps the order in which columns first appear.
    names = dict.fromkeys(name for table in tables for name in table.columns)
    sections = sections_of(names)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    fields = compare_configs([run.config for run in runs])
    body = render(
        TEMPLATE,
        title=title,
        runs=[_view_of(number, run) for number, run in enumerate(runs)],
        summary_headers=list(HEADERS),
        summary_rows=[(run.name, *summary_of(run)) for run in runs],
        sections=sections,
        field_rows=_field_rows(fields),
        different_rows=_field_rows(field for field in fields if field.differs),
        change_rows=_change_rows(runs),
        origin_rows=[(run.name, *_origin(origin)) for run in runs for origin in run.origins],
    )
    return make_page(title, body, data=content_of(runs, sections), styles=STYLES, scripts=SCRIPTS)


def _view_of(number: int, run: RunRecord) -> dict[str, Any]:
    """Values of the template for one run."""
    return {
        "number": number,
        "color": number % NUM_COLORS,
        "record": run,
        "time": run.goodput and goodput_bar(run.goodput) + goodput_legend(run.goodput),
        "samples": _first_and_last(run.texts),
    }


def _first_and_last(texts: Sequence[Sample]) -> Sequence[Sample]:
    half = MAX_TEXTS // 2
    return texts if len(texts) <= MAX_TEXTS else [*texts[:half], *texts[-half:]]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 1] + "…"


def _field_rows(fields: Iterable[FieldValues]) -> list[tuple[str, ...]]:
    return [(field.name, *map(_cut, field.values)) for field in fields]


def _change_rows(runs: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    return [
        (run.name, f"{change.step:,}", str(name), *(_cut(json.dumps(value)) for value in pair))
        for run in runs
        for change in run.changes
        for name, pair in change.fields.items()
        # Other values are from a damaged file.
        if isinstance(pair, list) and len(pair) == 2
    ]


def _origin(origin: Origin) -> tuple[str, ...]:
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    return (_when(origin.began), f"{origin.step:,}", origin.who, origin.devices, versions)


def _when(seconds: float) -> str:
    if not 0 <= seconds < LAST_SECOND:
        return f"{seconds:.0f}"
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S}"

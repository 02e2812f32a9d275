"""`zaya aegis timeline`: a run in one HTML file that asks nobody for anything.

Lanes and curves are drawn here, as SVG whose width is the run's time; `timeline.js` only moves its window,
says what is under the pointer, and lists the events. `pages.py` has what it shares with other pages.
"""

import dataclasses
import datetime
import html
import math
import pathlib
import string
from collections.abc import Iterable, Sequence
from typing import Any

from zaya_jax import durable
from zaya_jax.aegis.goodput import BUCKETS, Goodput, Life, find_attempts, measure
from zaya_jax.aegis.journal import BEGAN, ENDS, FINISHED, SPIKED, STARVED, STOPPED, WENT_BACK, read_events
from zaya_jax.aegis.pages import bar_of, class_of, legend_of, make_page
from zaya_jax.aegis.sightings import read_sightings
from zaya_jax.aegis.timeline import (
    DECISIONS,
    EVENTS,
    SIGHTINGS,
    Mark,
    Slice,
    losses_of,
    marks_of,
    slices_of,
    steps_of,
)
from zaya_jax.options import Parser

WIDTH = 1_000_000
"""Of a run's time, in the pictures' units: a second in eleven days."""
TEXT_BYTES = 1_200_000
"""Of all events' texts together: a page of any run opens at once."""
NEAR_SECONDS = 86400.0
"""Of a run's lives, that it shows of what was seen before and behind them."""
LONGEST_TEXT, SHORTEST_TEXT = 400, 40
HEIGHTS = {"lives": 24, "time": 72, EVENTS: 24, DECISIONS: 24, SIGHTINGS: 24, "step": 90, "loss": 120}
"""Of the lanes, in pixels, as `timeline.css` has them."""
TONES = {
    BEGAN: "good",
    FINISHED: "good",
    STOPPED: "plain",
    SPIKED: "warn",
    STARVED: "warn",
    WENT_BACK: "warn",
} | {end: "bad" for end in ENDS if end not in (FINISHED, STOPPED, WENT_BACK)}
"""How bad an event is; of others nobody knows."""


def main(argv: Sequence[str]) -> None:
    """Writes the page of a run.

    Raises:
      ValueError: for a folder that is no run's, or a run that has not begun its steps.
    """
    parser = Parser(
        "aegis timeline",
        "Draws what befell a run into one HTML file, to be opened in any browser.",
        ("zaya aegis timeline runs/tiny --output=tiny.html",),
    )
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="the folder of the run")
    parser.add_argument("--output", type=pathlib.Path, required=True, metavar="FILE", help="to be written")
    options = parser.parse_args(argv)
    page = page_of(options.run)
    with durable.naming(options.output):
        durable.write(options.output, page)
    print(f"{options.output}: {len(page.encode()):,} bytes")


def page_of(run: pathlib.Path) -> str:
    """The page of a run.

    Raises:
      ValueError: for a folder that is no run's, or a run that has not begun its steps.
    """
    events = read_events(run)
    goodput, lives = measure(events), find_attempts(events)
    marks = marks_of(events, read_sightings(run))
    marks = [mark for mark in marks if _is_near(mark.time, lives)]
    times = [life.began for life in lives] + [life.ended for life in lives] + [mark.time for mark in marks]
    scale = Scale(min(times), max(times))
    lanes = list(_lanes(run, events, lives, marks, scale))
    body = _BODY.substitute(
        name=html.escape(str(run)),
        sentence=html.escape(_sentence(goodput, scale)),
        bar=bar_of(goodput),
        legend=legend_of(goodput),
        names="".join(f'<div class="lane h-{lane.name}">{lane.title}</div>' for lane in lanes),
        lanes="".join(lane.svg for lane in lanes),
    )
    style, script = (pathlib.Path(__file__).with_name(f"timeline.{kind}") for kind in ("css", "js"))
    return make_page(str(run), body, data=_data(marks, scale), styles=[style], scripts=[script])


def _is_near(time: float, lives: Sequence[Life]) -> bool:
    # A host whose clock says 1970 would leave the run itself a line's width.
    return lives[0].began - NEAR_SECONDS <= time <= lives[-1].ended + NEAR_SECONDS


_BODY = string.Template("""<h1>$name</h1><p>$sentence</p>
$bar$legend
<noscript><p>Without scripts there is no time axis, no zoom and no list of events;
<code>zaya aegis events</code> lists them.</p></noscript>
<p class="hint">Wheel: zoom. Drag: zoom into a range. Double click: all of it. Times are UTC.</p>
<div id="chart"><div id="names"><div id="corner"></div>$names</div>
<div id="plot"><div id="axis"></div>$lanes<div id="cursor"></div><div id="brush"></div></div></div>
<h2>Events</h2><p><input id="filter" type="search" placeholder="filter by words"> <span id="count"></span></p>
<table><thead><tr><th>time, UTC<th>what<th>step<th>text</thead><tbody id="rows"></tbody></table>
""")


@dataclasses.dataclass(frozen=True)
class Lane:
    """A strip of the picture.

    Attributes:
      name: one of `HEIGHTS`.
      title: that people read.
      drawing: SVG.
    """

    name: str
    title: str
    drawing: str

    @property
    def svg(self) -> str:
        """The picture, as wide as its place."""
        return (
            f'<svg class="lane h-{self.name}" data-lane="{self.name}" '
            f'viewBox="0 0 {WIDTH} {HEIGHTS[self.name]}" preserveAspectRatio="none">{self.drawing}</svg>'
        )


class Scale:
    """Where a time lies in the pictures.

    Args:
      start: Unix time of their left end.
      end: Unix time of their right end.
    """

    def __init__(self, start: float, end: float):
        self.start, self.end = start, max(end, start + 1e-3)

    def __call__(self, time: float) -> int:
        """The place of a time, from 0 to `WIDTH`."""
        share = (time - self.start) / (self.end - self.start)
        return round(WIDTH * min(max(share, 0.0), 1.0))


def _lanes(
    run: pathlib.Path, events: list, lives: Sequence[Life], marks: Sequence[Mark], scale: Scale
) -> Iterable[Lane]:
    yield Lane("lives", "lives, by their end", _lives(lives, scale))
    yield Lane("time", "what time went into", _slices(slices_of(events), scale))
    for name in (EVENTS, DECISIONS, SIGHTINGS):
        yield Lane(name, name, _marks([mark for mark in marks if mark.lane == name], scale))
    steps = [[(time, float(step)) for time, step in curve] for curve in steps_of(lives)]
    yield Lane("step", f"step{_range(steps, ',.0f')}", _curves(steps, scale, HEIGHTS["step"]))
    losses = [[(time, loss) for time, loss in curve if loss > 0] for curve in losses_of(run, lives)]
    drawn = [[(time, math.log(loss)) for time, loss in curve] for curve in losses]
    title = f"loss{_range(losses, '.4g')} (log)"
    yield Lane("loss", title, _curves(drawn, scale, HEIGHTS["loss"]))


def _range(curves: Sequence[Sequence[tuple[float, float]]], form: str) -> str:
    values = [value for curve in curves for _, value in curve]
    return f" {min(values):{form}} to {max(values):{form}}" if values else ""


def _lives(lives: Sequence[Life], scale: Scale) -> str:
    return "".join(_rectangle(life, scale, is_newest=life is lives[-1]) for life in lives)


def _rectangle(life: Life, scale: Scale, *, is_newest: bool) -> str:
    start, end = scale(life.began), scale(life.ended)
    tone = TONES[life.end] if life.end is not None else "open" if is_newest else "bad"
    end_of = life.end or ("going on, or killed" if is_newest else "killed")
    steps = f"steps {life.first_step:,} to {life.last_step:,} in {life.ended - life.began:,.0f} s"
    # A life of a second must be seen in a run of weeks.
    width = max(end - start, WIDTH // 1000)
    place = f'x="{start}" y="3" width="{width}" height="18"'
    return f'<rect class="t-{tone}" {place}><title>{end_of}: {steps}</title></rect>'


def _slices(slices: Iterable[Slice], scale: Scale) -> str:
    """A column a stretch, in which each bucket has its share."""
    # A path a bucket, not an element a share: a page of thousands of them opens slowly.
    paths: dict[str, list[str]] = {bucket: [] for bucket in BUCKETS}
    for each in slices:
        start, end = scale(each.start), scale(each.end)
        height, top = HEIGHTS["time"] / max(sum(each.seconds.values()), 1e-9), 0.0
        for bucket in BUCKETS:
            if share := each.seconds.get(bucket, 0.0) * height:
                paths[bucket].append(f"M{start} {top:.1f}H{end}V{top + share:.1f}H{start}z")
                top += share
    return "".join(_path(class_of(bucket), parts) for bucket, parts in paths.items())


def _marks(marks: Iterable[Mark], scale: Scale) -> str:
    paths: dict[str, list[str]] = {}
    for mark in marks:
        paths.setdefault(_tone(mark), []).append(f"M{scale(mark.time)} 3v18")
    return "".join(_path(f"mark t-{tone}", parts) for tone, parts in paths.items())


def _tone(mark: Mark) -> str:
    if mark.lane == DECISIONS:
        return "decided"
    return TONES.get(mark.kind, "plain") if mark.lane == EVENTS else "warn"


def _curves(curves: Sequence[Sequence[tuple[float, float]]], scale: Scale, height: int) -> str:
    values = [value for curve in curves for _, value in curve]
    if not values:
        return ""
    low, high = min(values), max(values)
    unit = (height - 8) / max(high - low, 1e-9)
    paths = []
    for curve in curves:
        points = (f"{scale(time)} {height - 4 - (value - low) * unit:.1f}" for time, value in curve)
        paths.append("M" + "L".join(points))
    return _path("curve", [path for path in paths if path != "M"])


def _path(name: str, parts: Sequence[str]) -> str:
    return f'<path class="{name}" d="{"".join(parts)}"/>' if parts else ""


def _sentence(goodput: Goodput, scale: Scale) -> str:
    start, end = (datetime.datetime.fromtimestamp(t, datetime.UTC) for t in (scale.start, scale.end))
    return (
        f"Goodput {goodput.share:.1%}: {goodput.steps:,} steps in {goodput.total:,.0f} s, begun "
        f"{goodput.attempts} times, {goodput.lost_steps:,} steps made again. {start:%Y-%m-%d %H:%M:%S} to "
        f"{end:%Y-%m-%d %H:%M:%S} UTC."
    )


def _data(marks: Sequence[Mark], scale: Scale) -> dict[str, Any]:
    """What the script needs."""
    longest = min(LONGEST_TEXT, max(TEXT_BYTES // max(len(marks), 1), SHORTEST_TEXT))
    rows = [
        [
            round(mark.time - scale.start, 2),
            mark.lane,
            mark.kind[:SHORTEST_TEXT],
            mark.step,
            mark.text[:longest],
        ]
        for mark in marks
    ]
    return {"start": scale.start, "seconds": scale.end - scale.start, "width": WIDTH, "marks": rows}

"""`zaya aegis timeline`: the history of a run as one HTML file.

This module draws lanes and curves as SVG, whose width is the time of the run. `timeline.js` zooms, shows what
is under the pointer, and lists the events.
"""

import dataclasses
import datetime
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from zaya_jax.aegis.agent.sightings import read_sightings
from zaya_jax.aegis.views.goodput import BUCKETS, AttemptRecord, Goodput, find_attempts, measure
from zaya_jax.aegis.views.goodput_bar import bucket_class, goodput_bar, goodput_legend
from zaya_jax.aegis.views.timeline import (
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
from zaya_jax.files import durable
from zaya_jax.html_page.frame import make_page, render
from zaya_jax.options import Parser
from zaya_jax.run_folder.events import read_events
from zaya_jax.run_folder.names import BEGAN, ENDS, FINISHED, SPIKED, STARVED, STOPPED, STRAGGLING, WENT_BACK

WIDTH = 1_000_000
"""Width of the time axis in SVG units: a second of a run of eleven days."""
TEXT_BYTES = 1_200_000
"""Maximum size of the texts of all events together, so that the page of any run opens fast."""
NEAR_SECONDS = 86400.0
"""Time before the first attempt and after the last one in which events are shown."""
MAX_TEXT, MIN_TEXT = 400, 40
"""Characters that are shown of an event's text: in runs with few events, and in those with very many."""
HEIGHTS = {"attempts": 24, "time": 72, EVENTS: 24, DECISIONS: 24, SIGHTINGS: 24, "step": 90, "loss": 120}
"""Heights of the lanes in pixels, the same as in `timeline.css`."""
TONES = {
    BEGAN: "good",
    FINISHED: "good",
    STOPPED: "plain",
    SPIKED: "warn",
    STARVED: "warn",
    STRAGGLING: "warn",
    WENT_BACK: "warn",
} | {end: "bad" for end in ENDS if end not in (FINISHED, STOPPED, WENT_BACK)}
"""Severities of event kinds, for CSS classes; other kinds are plain."""


def main(argv: Sequence[str]) -> None:
    """Writes the timeline of a run to a file.

    Raises:
      UserError: for a folder that is not a run's, or a run that has not begun its first step.
    """
    parser = Parser(
        "aegis timeline",
        "Write the history of a run as one HTML file, to be opened in any browser.",
        ("zaya aegis timeline runs/tiny --output=tiny.html",),
    )
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--output", type=pathlib.Path, required=True, metavar="FILE", help="HTML file to write"
    )
    options = parser.parse_args(argv)
    page = page_of(options.run)
    with durable.path_in_errors(options.output):
        durable.write(options.output, page)
    print(f"{options.output}: {len(page.encode()):,} bytes")


def page_of(run: pathlib.Path) -> str:
    """Returns the timeline of a run as HTML.

    Raises:
      UserError: for a folder that is not a run's, or a run that has not begun its first step.
    """
    events = read_events(run)
    goodput, attempts = measure(events), find_attempts(events)
    marks = marks_of(events, read_sightings(run))
    marks = [mark for mark in marks if _is_near(mark.time, attempts)]
    # Marks may be outside all attempts: sightings come at any time, and decisions between two attempts.
    times = (
        [each.began for each in attempts] + [each.ended for each in attempts] + [mark.time for mark in marks]
    )
    scale = Scale(min(times), max(times))
    here = pathlib.Path(__file__)
    body = render(
        here.with_name("timeline.html.jinja"),
        name=str(run),
        summary=_summary(goodput, scale),
        bar=goodput_bar(goodput) + goodput_legend(goodput),
        lanes=list(_lanes(run, events, attempts, marks, scale)),
        width=WIDTH,
        heights=HEIGHTS,
    )
    style, script = (here.with_name(f"timeline.{kind}") for kind in ("css", "js"))
    return make_page(str(run), body, data=_data(marks, scale), styles=[style], scripts=[script])


def _is_near(time: float, attempts: Sequence[AttemptRecord]) -> bool:
    # A host with a wrong clock, such as 1970, would compress the run itself to the width of a line.
    return attempts[0].began - NEAR_SECONDS <= time <= attempts[-1].ended + NEAR_SECONDS


@dataclasses.dataclass(frozen=True)
class Lane:
    """A horizontal strip of the timeline.

    Attributes:
      name: name of the lane, a key of `HEIGHTS`.
      title: title on the page.
      drawing: content of the lane as SVG.
    """

    name: str
    title: str
    drawing: str


class Scale:
    """Conversion of times into horizontal positions.

    Args:
      start: Unix time of the left end in seconds.
      end: Unix time of the right end in seconds.
    """

    def __init__(self, start: float, end: float):
        # A history of a single moment has no length, by which positions are divided.
        self.start, self.end = start, max(end, start + 1e-3)

    def __call__(self, time: float) -> int:
        """Returns the position of a time, from 0 to `WIDTH`."""
        share = (time - self.start) / (self.end - self.start)
        return round(WIDTH * min(max(share, 0.0), 1.0))


def _lanes(
    run: pathlib.Path, events: list, attempts: Sequence[AttemptRecord], marks: Sequence[Mark], scale: Scale
) -> Iterable[Lane]:
    yield Lane("attempts", "attempts, by their end", _attempts(attempts, scale))
    yield Lane("time", "time by bucket", _slices(slices_of(events), scale))
    for name in (EVENTS, DECISIONS, SIGHTINGS):
        yield Lane(name, name, _marks([mark for mark in marks if mark.lane == name], scale))
    # One curve per attempt: a restart goes back in steps, and must not be connected by a line.
    steps = [[(time, float(step)) for time, step in curve] for curve in steps_of(attempts)]
    yield Lane("step", f"step{_range(steps, ',.0f')}", _curves(steps, scale, HEIGHTS["step"]))
    losses = [[(time, loss) for time, loss in curve if loss > 0] for curve in losses_of(run, attempts)]
    # A loss of 0 or less has no logarithm; it can only come from a damaged file.
    drawn = [[(time, math.log(loss)) for time, loss in curve] for curve in losses]
    title = f"loss{_range(losses, '.4g')} (log)"
    yield Lane("loss", title, _curves(drawn, scale, HEIGHTS["loss"]))


def _range(curves: Sequence[Sequence[tuple[float, float]]], form: str) -> str:
    values = [value for curve in curves for _, value in curve]
    return f" {min(values):{form}} to {max(values):{form}}" if values else ""


def _attempts(attempts: Sequence[AttemptRecord], scale: Scale) -> str:
    return "".join(_rectangle(each, scale, is_newest=each is attempts[-1]) for each in attempts)


def _rectangle(attempt: AttemptRecord, scale: Scale, *, is_newest: bool) -> str:
    start, end = scale(attempt.began), scale(attempt.ended)
    tone = TONES[attempt.end] if attempt.end is not None else "open" if is_newest else "bad"
    end_of = attempt.end or ("running, or killed" if is_newest else "killed")
    seconds = attempt.ended - attempt.began
    steps = f"steps {attempt.first_step:,} to {attempt.last_step:,} in {seconds:,.0f} s"
    # An attempt of a second must be visible in a run of weeks.
    width = max(end - start, WIDTH // 1000)
    place = f'x="{start}" y="3" width="{width}" height="18"'
    return f'<rect class="t-{tone}" {place}><title>{end_of}: {steps}</title></rect>'


def _slices(slices: Iterable[Slice], scale: Scale) -> str:
    """Returns a column for each slice, in which each bucket has a height in proportion to its time."""
    # One path per bucket instead of one element per column: pages with thousands of elements open slowly.
    paths: dict[str, list[str]] = {bucket: [] for bucket in BUCKETS}
    for each in slices:
        start, end = scale(each.start), scale(each.end)
        height, top = HEIGHTS["time"] / max(sum(each.seconds.values()), 1e-9), 0.0
        for bucket in BUCKETS:
            if share := each.seconds.get(bucket, 0.0) * height:
                paths[bucket].append(f"M{start} {top:.1f}H{end}V{top + share:.1f}H{start}z")
                top += share
    return "".join(_path(bucket_class(bucket), parts) for bucket, parts in paths.items())


def _marks(marks: Iterable[Mark], scale: Scale) -> str:
    # Marks of one severity are one path as well.
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
    # SVG's vertical axis points down, so that the largest value is at the top with a margin of 4 pixels.
    unit = (height - 8) / max(high - low, 1e-9)
    paths = []
    for curve in curves:
        points = (f"{scale(time)} {height - 4 - (value - low) * unit:.1f}" for time, value in curve)
        paths.append("M" + "L".join(points))
    # An attempt without points leaves a lone "M", which moves the pen and draws nothing.
    return _path("curve", [path for path in paths if path != "M"])


def _path(name: str, parts: Sequence[str]) -> str:
    return f'<path class="{name}" d="{"".join(parts)}"/>' if parts else ""


def _summary(goodput: Goodput, scale: Scale) -> str:
    start, end = (datetime.datetime.fromtimestamp(t, datetime.UTC) for t in (scale.start, scale.end))
    return f"Goodput {goodput.summary}. {start:%Y-%m-%d %H:%M:%S} to {end:%Y-%m-%d %H:%M:%S} UTC."


def _data(marks: Sequence[Mark], scale: Scale) -> dict[str, Any]:
    """Returns the data of the script: the range of time, and the marks."""
    # In runs with very many events each gets an equal part of TEXT_BYTES.
    longest = min(MAX_TEXT, max(TEXT_BYTES // max(len(marks), 1), MIN_TEXT))
    rows = [
        [
            round(mark.time - scale.start, 2),
            mark.lane,
            # Kinds are read from files as well, and may have any length.
            mark.kind[:MIN_TEXT],
            mark.step,
            mark.text[:longest],
        ]
        for mark in marks
    ]
    return {"start": scale.start, "seconds": scale.end - scale.start, "width": WIDTH, "marks": rows}

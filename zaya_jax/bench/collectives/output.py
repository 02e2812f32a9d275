"""Results of `zaya bench collectives` as tables and as a picture."""

import pathlib
from collections.abc import Iterator, Mapping

from rich.table import Table

from zaya_jax.bench.collectives.advice import message_times
from zaya_jax.plan.measured import CollectiveTimes, Curve
from zaya_jax.plan.output.picture import new_figure
from zaya_jax.text_tables import format_bytes, name_column, number_column


def tables(results: CollectiveTimes, messages: Mapping[str, Mapping[str, int]], run: str) -> Iterator[Table]:
    """Returns the times of each grouping, the fitted lines, and the estimated time of a run's messages.

    Args:
      results: measured times.
      messages: bytes of the messages of a step, by collective and name.
      run: name of the run.
    """
    for layout in results.layouts:
        yield _times(results, layout)
    yield _lines(results)
    yield _messages(results, messages, run)


def _times(results: CollectiveTimes, layout: str) -> Table:
    timings = [each for each in results.timings if each.layout == layout]
    groups = timings[0].num_groups
    title = f"{layout}: {groups} group{'s' * (groups > 1)} of {timings[0].group_size} devices; GB/s"
    columns = map(number_column, ("message", "time", "algorithm", "bus"))
    table = Table(name_column("collective"), *columns, title=title)
    # The next row tells whether this one is the last of its collective.
    for each, after in zip(timings, [*timings[1:], None], strict=True):
        table.add_row(
            each.collective,
            format_bytes(each.num_bytes),
            format_seconds(each.seconds),
            f"{each.algorithm_bandwidth / 1e9:.3g}",
            f"{each.bus_bandwidth / 1e9:.3g}",
            end_section=after is None or after.collective != each.collective,
        )
    return table


def _lines(results: CollectiveTimes) -> Table:
    columns = ("latency", "bus GB/s\nof the line", "best", "half latency\nat", "typical\nerror")
    title = "time = latency + bytes / bandwidth, by least squares of relative errors"
    table = Table(name_column("layout"), *map(number_column, columns), title=title)
    before = None
    for layout, collective, curve in curves(results):
        if layout != before:
            table.add_section()
            table.add_row(layout, style="bold")
        before = layout
        # A time that does not grow with the size tells no bandwidth, and no size at which latency is half.
        line, slope = curve.line, bus_bandwidth_of(curve)
        table.add_row(
            f"  {collective}",
            format_seconds(line.latency_seconds),
            "" if slope is None else f"{slope / 1e9:.3g}",
            f"{curve.best_bus_bandwidth / 1e9:.3g}",
            "" if slope is None else format_bytes(int(line.half_bytes)),
            f"{line.typical_error:.0%}",
        )
    return table


def bus_bandwidth_of(curve: Curve) -> float | None:
    """Fitted bytes per second of a device's links; None if the time did not grow with the size."""
    per_byte = curve.line.seconds_per_byte
    return curve.bus_factor / per_byte if per_byte else None


def curves(results: CollectiveTimes) -> Iterator[tuple[str, str, Curve]]:
    """Yields all groupings and collectives with at least two measured sizes."""
    for layout in results.layouts:
        for collective in dict.fromkeys(each.collective for each in results.timings):
            curve = results.curve(layout, collective)
            if curve is not None:
                yield layout, collective, curve


def _messages(results: CollectiveTimes, messages: Mapping[str, Mapping[str, int]], run: str) -> Table:
    devices = results.num_nodes * results.devices_per_node
    title = f"messages of a step of {run} among these {devices} devices"
    columns = map(number_column, ("messages", "bytes", "largest", "time", "as one"))
    # Beyond the measured sizes the estimates are extrapolated, and the caption says so.
    largest = max(each.num_bytes for each in results.timings)
    caption = f"above {format_bytes(largest)}, the largest measured, at the bandwidth of the largest"
    table = Table(name_column("collective"), *columns, title=title, caption=caption)
    for each in message_times(results, messages):
        table.add_row(
            each.collective,
            f"{each.count:,}",
            format_bytes(each.num_bytes),
            format_bytes(max(messages[each.collective].values())),
            format_seconds(each.seconds),
            format_seconds(each.combined_seconds),
        )
    return table


def format_seconds(seconds: float) -> str:
    """Formats a time with a suitable unit: "12.3 us", "4.56 ms" or "7.89 s"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return (
                f"{seconds / size:,.3g} {unit}" if seconds < 100 * size else f"{seconds / size:,.0f} {unit}"
            )
    return f"{seconds / 1e-6:,.3g} us"


def draw(file: pathlib.Path, results: CollectiveTimes) -> None:
    """Writes a picture of bus bandwidth by size for each grouping, with the fitted lines.

    Raises:
      UserError: if matplotlib is missing.
    """
    figure = new_figure()
    machine = results.machine
    figure.suptitle(
        f"{results.num_nodes} x {results.devices_per_node} {machine.device}, "
        f"processes: {results.num_processes}, jax {machine.jax}: "
        "bus bandwidth; dashed: latency + bytes / bandwidth"
    )
    # Without squeezing, a single panel comes in an array as well.
    panels = figure.subplots(1, len(results.layouts), sharey=True, squeeze=False)[0]
    axes_by_layout = dict(zip(results.layouts, panels, strict=True))
    for layout, collective, curve in curves(results):
        axes, factor, line = axes_by_layout[layout], curve.bus_factor, curve.line
        rates = [
            size * factor / time / 1e9 for size, time in zip(curve.num_bytes, curve.seconds, strict=True)
        ]
        (drawn,) = axes.loglog(curve.num_bytes, rates, marker="o", markersize=3, label=collective)
        fitted = [size * factor / line.seconds(size) / 1e9 for size in curve.num_bytes]
        axes.loglog(curve.num_bytes, fitted, ls="--", lw=0.8, color=drawn.get_color())
    for layout, axes in axes_by_layout.items():
        axes.set(title=layout, xlabel="bytes of a message")
    panels[0].set_ylabel("GB/s")
    panels[0].legend(fontsize=7)
    figure.savefig(file, dpi=120)

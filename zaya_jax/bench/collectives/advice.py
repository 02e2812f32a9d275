"""Advice on the messages of a ZAYA1 step, from measured collectives."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from zaya_jax.plan.measured import ALL, IN_NODE, ONE_RAIL, RAILS, CollectiveTimes, Curve
from zaya_jax.text_tables import format_bytes

SLOW_SHARE = 0.7
"""A size is slow if it reaches less than this share of the bandwidth of a smaller message."""
GAIN = 0.1
"""Share of the messages' time that combining them must save to be advised."""


@dataclasses.dataclass(frozen=True)
class MessageTimes:
    """The messages of one collective in a step, and their measured time among all devices.

    Attributes:
      collective: name of the collective.
      count: number of messages.
      num_bytes: total bytes of the messages.
      seconds: time of the messages one after the other.
      combined_seconds: time of a single message of all bytes.
      short_count: number of messages that reach less than half of the best bandwidth.
      short_seconds: time of those messages.
    """

    collective: str
    count: int
    num_bytes: int
    seconds: float
    combined_seconds: float
    short_count: int
    short_seconds: float


def message_times(results: CollectiveTimes, messages: Mapping[str, Mapping[str, int]]) -> list[MessageTimes]:
    """Estimates the time of a step's messages among the measured devices, by collective.

    Args:
      results: measured times.
      messages: bytes of each message by collective and name, from `zaya_jax.plan.arithmetic.messages`.
    """
    times = []
    for collective, sizes in messages.items():
        curve = results.curve(ALL, collective)
        if curve is None:
            continue
        # Convert bus bandwidth back to message bytes per second.
        full = curve.best_bus_bandwidth / curve.bus_factor
        # At half of the best bandwidth a message takes twice its shortest time.
        short = [size for size in sizes.values() if curve.at(size) > 2 * size / full]
        times.append(
            MessageTimes(
                collective=collective,
                count=len(sizes),
                num_bytes=sum(sizes.values()),
                seconds=math.fsum(map(curve.at, sizes.values())),
                combined_seconds=curve.at(sum(sizes.values())),
                short_count=len(short),
                short_seconds=math.fsum(map(curve.at, short)),
            )
        )
    return times


def advice(results: CollectiveTimes, messages: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns one sentence for each finding; empty if nothing should change."""
    return [*_on_messages(results, messages), *_on_sizes(results), *_on_groups(results)]


def _on_messages(results: CollectiveTimes, messages: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    for each in message_times(results, messages):
        # Short messages mostly pay latency, which one combined message pays only once.
        if each.short_count and each.combined_seconds < (1 - GAIN) * each.seconds:
            yield (
                f"{each.collective}: {each.short_count} of the step's {each.count} messages reach less than "
                f"half of the bandwidth and take {each.short_seconds / each.seconds:.0%} of the time; one "
                f"combined message would take {1e3 * each.combined_seconds:,.1f} ms instead of "
                f"{1e3 * each.seconds:,.1f}: set XLA's combine threshold for it to {each.num_bytes}"
            )
        # Bandwidth can fall at very large sizes, and then combining makes a step slower.
        elif each.combined_seconds > each.seconds / SLOW_SHARE:
            yield (
                f"{each.collective}: the step's {each.count} messages take {1e3 * each.seconds:,.1f} ms; one "
                f"combined message would take {1e3 * each.combined_seconds:,.1f}: prevent XLA from combining "
                "them with a combine threshold below the largest message"
            )


def _on_sizes(results: CollectiveTimes) -> Iterator[str]:
    for layout in results.layouts:
        slow = [
            f"{collective} of {format_bytes(size)} ({share:.0%})"
            # A dict keeps the order of measurement, which a set would not.
            for collective in dict.fromkeys(each.collective for each in results.timings)
            if (curve := results.curve(layout, collective))
            for size, share in slow_sizes(curve).items()
        ]
        if slow:
            yield (
                f"{layout}: slower than a smaller message: {', '.join(slow)}; avoid such sizes, or try "
                "another version or algorithm of the communication library"
            )


def slow_sizes(curve: Curve) -> dict[int, float]:
    """Returns the sizes that reach less bandwidth than a smaller one, with their share of that bandwidth."""
    slow: dict[int, float] = {}
    best = 0.0
    for size, seconds in zip(curve.num_bytes, curve.seconds, strict=True):
        # Algorithm bandwidth: all sizes of a curve have the same bus factor, which cancels in the ratio.
        rate = size / seconds
        if rate < SLOW_SHARE * best:
            slow[size] = rate / best
        best = max(best, rate)
    return slow


def _on_groups(results: CollectiveTimes) -> Iterator[str]:
    # Part of a node has fewer links in use: compare it with the whole node.
    whole = results.in_node("all_reduce")
    for layout in results.layouts:
        part = results.curve(layout, "all_reduce")
        is_part = layout not in (ALL, IN_NODE, RAILS, ONE_RAIL)
        if is_part and whole and part and part.best_bus_bandwidth < SLOW_SHARE * whole.best_bus_bandwidth:
            yield (
                f"all_reduce among {layout} reaches {part.best_bus_bandwidth / 1e9:,.1f} GB/s, among the "
                f"whole node {whole.best_bus_bandwidth / 1e9:,.1f}: use collectives of whole nodes"
            )
    # If rails slow each other down, they share a NIC, a switch or the host's PCIe lanes.
    rails, alone = (results.curve(layout, "all_reduce") for layout in (RAILS, ONE_RAIL))
    if rails and alone and rails.best_bus_bandwidth < SLOW_SHARE * alone.best_bus_bandwidth:
        yield (
            f"one rail alone reaches {alone.best_bus_bandwidth / 1e9:,.1f} GB/s, with all rails busy "
            f"{rails.best_bus_bandwidth / 1e9:,.1f} each: the rails share hardware; check that each device "
            "has its own NIC and that NICs of different rails use different switches"
        )

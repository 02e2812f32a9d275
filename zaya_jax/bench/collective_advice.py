"""What measured collectives mean for the messages of a ZAYA1 step, in sentences."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from zaya_jax.plan.measured import ALL, IN_NODE, ONE_RAIL, RAILS, CollectiveTimes, Curve
from zaya_jax.tables import format_bytes

SLOW_SHARE = 0.7
"""Of the bandwidth that a smaller message reached, below which a size is slow for no reason of physics."""
GAIN = 0.1
"""Of the time of a step's messages, above which it pays to send small ones together."""


@dataclasses.dataclass(frozen=True)
class MessageTimes:
    """The messages of one collective in a step, and what they take among all devices.

    Attributes:
      collective: its name.
      count: how many messages.
      num_bytes: of all.
      seconds: one after the other, as measured.
      combined_seconds: as one message.
      short_count: those that reach less than half of the bandwidth that some size does.
      short_seconds: that these take.
    """

    collective: str
    count: int
    num_bytes: int
    seconds: float
    combined_seconds: float
    short_count: int
    short_seconds: float


def message_times(found: CollectiveTimes, messages: Mapping[str, Mapping[str, int]]) -> list[MessageTimes]:
    """What a step's messages take among the devices that were measured, by collective.

    Args:
      found: what was measured.
      messages: bytes of each by collective and name, as `zaya_jax.plan.arithmetic.messages` has them.
    """
    times = []
    for collective, sizes in messages.items():
        curve = found.curve(ALL, collective)
        if curve is None:
            continue
        full = curve.best_bus_bandwidth / curve.bus_factor
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


def advice(found: CollectiveTimes, messages: Mapping[str, Mapping[str, int]]) -> list[str]:
    """All that the measurement advises; empty where nothing is to be done."""
    return [*_on_messages(found, messages), *_on_sizes(found), *_on_groups(found)]


def _on_messages(found: CollectiveTimes, messages: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    for each in message_times(found, messages):
        if each.short_count and each.combined_seconds < (1 - GAIN) * each.seconds:
            yield (
                f"{each.collective}: {each.short_count} of the step's {each.count} messages reach less than "
                f"half of the bandwidth, in {each.short_seconds / each.seconds:.0%} of the time; as one "
                f"message all would take {1e3 * each.combined_seconds:,.1f} ms and not "
                f"{1e3 * each.seconds:,.1f}: set XLA's combine threshold for it to {each.num_bytes}"
            )
        elif each.combined_seconds > each.seconds / SLOW_SHARE:
            yield (
                f"{each.collective}: the step's {each.count} messages take {1e3 * each.seconds:,.1f} ms, as "
                f"one they would take {1e3 * each.combined_seconds:,.1f}: keep XLA from combining them, by "
                "a threshold below the largest"
            )


def _on_sizes(found: CollectiveTimes) -> Iterator[str]:
    for layout in found.layouts:
        slow = [
            f"{collective} of {format_bytes(size)} ({share:.0%})"
            for collective in dict.fromkeys(each.collective for each in found.timings)
            if (curve := found.curve(layout, collective))
            for size, share in slow_sizes(curve).items()
        ]
        if slow:
            yield (
                f"{layout}: these reach less than a smaller message's bandwidth: {', '.join(slow)}; avoid "
                "such sizes, or try another version or algorithm of the communication library"
            )


def slow_sizes(curve: Curve) -> dict[int, float]:
    """Sizes that reach less bandwidth than a smaller one, and what share of it they reach."""
    slow: dict[int, float] = {}
    best = 0.0
    for size, seconds in zip(curve.num_bytes, curve.seconds, strict=True):
        rate = size / seconds
        if rate < SLOW_SHARE * best:
            slow[size] = rate / best
        best = max(best, rate)
    return slow


def _on_groups(found: CollectiveTimes) -> Iterator[str]:
    whole = found.in_node("all_reduce")
    for layout in found.layouts:
        part = found.curve(layout, "all_reduce")
        is_part = layout not in (ALL, IN_NODE, RAILS, ONE_RAIL)
        if is_part and whole and part and part.best_bus_bandwidth < SLOW_SHARE * whole.best_bus_bandwidth:
            yield (
                f"all_reduce among {layout} reaches {part.best_bus_bandwidth / 1e9:,.1f} GB/s where all of "
                f"the node reach {whole.best_bus_bandwidth / 1e9:,.1f}: let collectives have whole nodes"
            )
    rails, alone = (found.curve(layout, "all_reduce") for layout in (RAILS, ONE_RAIL))
    if rails and alone and rails.best_bus_bandwidth < SLOW_SHARE * alone.best_bus_bandwidth:
        yield (
            f"one rail alone reaches {alone.best_bus_bandwidth / 1e9:,.1f} GB/s, all at once "
            f"{rails.best_bus_bandwidth / 1e9:,.1f} each: rails share something; see that each device has a "
            "NIC of its own, and each NIC its switch"
        )

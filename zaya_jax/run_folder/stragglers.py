"""Stragglers of a run that its events name."""

from collections.abc import Iterable, Mapping
from typing import Any

from zaya_jax.run_folder.names import BEGAN, CAUGHT_UP, ENDS, STRAGGLING


def active_stragglers(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the events of the processes and devices that are slower than the others now.

    Args:
      events: events of a run in the order of writing.
    """
    active: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for event in events:
        place = tuple(str(event.get(name)) for name in ("process", "device", "section"))
        # Each attempt starts its comparison from scratch, perhaps on other nodes.
        if event["event"] in (BEGAN, *ENDS):
            active.clear()
        elif event["event"] == STRAGGLING:
            active[place] = event
        elif event["event"] == CAUGHT_UP:
            active.pop(place, None)
    return list(active.values())

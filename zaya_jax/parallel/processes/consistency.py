"""Check that all processes of a run have the same values, and name those that differ.

Each process sends one hash; on the way to process 0, equal ones are counted. Only if hashes differ, values
are sent: first those of the majority to all processes, then the differences of a few processes from them.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.errors import CollectiveError
from zaya_jax.parallel.processes.tree.exchanges import first_known

_MISSING = "missing"
# Numbers of fields and processes that an error lists.
_MAX_FIELDS, _MAX_PROCESSES = 4, 8
# Number of characters of a value that an error shows.
_MAX_CHARACTERS = 80


def require_same(name: str, values: Mapping[str, str]) -> None:
    """Checks that all processes have the same values. All processes must call it.

    Args:
      name: name of what is compared, such as "config".
      values: values of this process, by field.

    Raises:
      CollectiveError: in all processes, each of which prints it, with the processes and fields that differ.
      PeerTimeout: if some processes do not take part in time.
    """
    if hosts.num_processes() == 1:
        return
    content = json.dumps(sorted(values.items())).encode()
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    digests = hosts.reduce(f"same {name}", {digest: [1, hosts.process()]}, count_digests)
    if len(digests) == 1:
        return
    # Among digests that are equally common, this chooses that of the process with the lowest number.
    _, reference = max(digests.values(), key=lambda each: (each[0], -each[1]))
    own = dict(values) if hosts.process() == reference else None
    common = hosts.reduce(f"same {name}: values", own, first_known)
    difference = _differences(values, common)
    own = [] if difference is None else [f"{hosts.describe(hosts.process())} {difference}"]
    num_different, different = hosts.reduce(f"same {name}: differences", [len(own), own], _first_few)
    num_more = num_different - len(different)
    more = f"; {num_more} more processes differ" if num_more else ""
    listed = "; ".join(different)
    raise CollectiveError(
        f"the processes of this run differ in their {name}: {listed}{more}; most are as "
        f"{hosts.describe(reference)}; start all with the same {name}"
        if hosts.num_processes() > 2
        else f"the processes of this run differ in their {name}: {listed} on "
        f"{hosts.describe(reference)}; start both with the same {name}",
        is_printed_here=True,
    )


def count_digests(values: list[dict[str, list[int]]]) -> dict[str, list[int]]:
    """Merges digests, each with its number of processes and the first of them."""
    counts: dict[str, list[int]] = {}
    for each in values:
        for digest, (count, first) in each.items():
            known, lowest = counts.get(digest, (0, first))
            counts[digest] = [known + count, min(lowest, first)]
    return counts


def _first_few(values: list[list[Any]]) -> list[Any]:
    """Merges numbers of processes that differ, and the descriptions of the first of them."""
    texts = [text for _, listed in values for text in listed]
    return [sum(count for count, _ in values), texts[:_MAX_PROCESSES]]


def _differences(ours: Mapping[str, str], common: Mapping[str, str]) -> str | None:
    """Describes the fields of this process that differ from the common ones; None if there are none."""
    fields = [key for key in sorted({*ours, *common}) if ours.get(key) != common.get(key)]
    if not fields:
        return None
    listed = [
        f"{key} {_shorten(ours.get(key))} instead of {_shorten(common.get(key))}"
        for key in fields[:_MAX_FIELDS]
    ]
    more = f" and {len(fields) - _MAX_FIELDS} more fields" if len(fields) > _MAX_FIELDS else ""
    return f"has {', '.join(listed)}{more}"


def _shorten(value: str | None) -> str:
    if value is None:
        return _MISSING
    return value if len(value) <= _MAX_CHARACTERS else f"{value[:_MAX_CHARACTERS]}..."

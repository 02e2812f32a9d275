"""Check that all processes of a run have the same values, and name those that differ.

Each process sends one hash. Only if these differ, values are sent: first those of the majority to all
processes, then each process' differences from them.
"""

import collections
import hashlib
import json
from collections.abc import Mapping

from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.errors import CollectiveError

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
    digests = hosts.gather(f"same {name}", hashlib.blake2b(content, digest_size=16).hexdigest())
    if len(set(digests)) == 1:
        return
    # Among digests that are equally common, this chooses that of the process with the lowest number.
    reference = digests.index(collections.Counter(digests).most_common(1)[0][0])
    is_reference = hosts.process() == reference
    common = hosts.gather(f"same {name}: values", dict(values) if is_reference else None)[reference]
    all_differences = hosts.gather(f"same {name}: differences", _differences(values, common))
    different = [
        f"{hosts.describe(number)} {text}" for number, text in enumerate(all_differences) if text is not None
    ]
    more = (
        f"; {len(different) - _MAX_PROCESSES} more processes differ"
        if len(different) > _MAX_PROCESSES
        else ""
    )
    listed = "; ".join(different[:_MAX_PROCESSES])
    raise CollectiveError(
        f"the processes of this run differ in their {name}: {listed}{more}; most are as "
        f"{hosts.describe(reference)}; start all with the same {name}"
        if hosts.num_processes() > 2
        else f"the processes of this run differ in their {name}: {listed} on "
        f"{hosts.describe(reference)}; start both with the same {name}",
        is_printed_here=True,
    )


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

"""Verification of checkpoints by all processes of a run, each of which reads a share of the files.

One process would read a terabyte for minutes or hours while all others wait. Process 0 decides which
checkpoints are verified, and finds missing and extra files; the bytes are divided.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import TypeVar

from zaya_jax.checkpoint.format.layout import step_folder
from zaya_jax.checkpoint.format.manifest import (
    Part,
    all_damage,
    all_files,
    average_files,
    damage_in_share,
    damage_of,
    weight_files,
)
from zaya_jax.checkpoint.newest import Verify
from zaya_jax.errors import UserError
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.errors import CollectiveError
from zaya_jax.parallel.processes.tree.exchanges import first_known

VERIFY_SECONDS = 4 * 3600.0
"""Time limit for reading every byte of the newest checkpoint, and of older ones if that is damaged: 1 TB at
100 MB/s takes one process three hours."""
_PARTS: dict[str, Part] = {part.__name__: part for part in (all_files, weight_files, average_files)}
_REQUEST = "checkpoint to verify"
T = TypeVar("T")


def verified_together(name: str, work: Callable[[Verify], T]) -> T | None:
    """Calls a function in process 0; all processes read the checkpoints that it verifies.

    Args:
      name: name of the exchange, see `hosts.run_on_all`.
      work: function to call, of a function like `damage_of`.

    Returns:
      The result in process 0, and None in the others.

    Raises:
      CollectiveError: with the message of process 0, if `work` raised a UserError or an OSError; with that of
        a process that does not see a checkpoint.
      PeerTimeout: if some processes do not finish in time.
    """
    if hosts.num_processes() == 1:
        return work(damage_of)
    take_part = functools.partial(_lead, work) if hosts.is_first() else _follow
    return hosts.run_on_all(name, take_part, limit_seconds=VERIFY_SECONDS)


def _lead(work: Callable[[Verify], T]) -> T:
    try:
        result = work(_damage_of)
    except CollectiveError:
        # Raised by all in the middle of a verification.
        raise
    except (UserError, OSError):
        # The others leave as well, and learn of the failure.
        hosts.broadcast_from_first(_REQUEST, None)
        raise
    hosts.broadcast_from_first(_REQUEST, None)
    return result


def _follow() -> None:
    # Process 0 ends the loop, also where it has failed.
    while (request := hosts.broadcast_from_first(_REQUEST, None, limit_seconds=VERIFY_SECONDS)) is not None:
        run_folder, step, part = request
        _read_share(run_folder, step, _PARTS[part])


def _damage_of(run_folder: str | pathlib.Path, step: int, part: Part) -> str | None:
    """`damage_of` in process 0, with the help of the others."""
    # Names first: another process must not read a pipe, which would block for ever.
    damage = next(all_damage(run_folder, step, hashes=False, part=part), None)
    if damage is not None:
        return damage
    hosts.broadcast_from_first(_REQUEST, [str(run_folder), step, part.__name__])
    return _read_share(run_folder, step, part)


def _read_share(run_folder: str | pathlib.Path, step: int, part: Part) -> str | None:
    """Reads this process's share; returns the first damage that any process has found."""
    # A host that does not see the folder would otherwise report that all checkpoints are damaged.
    hosts.run_on_all("visible checkpoint", lambda: _require_visible(step_folder(run_folder, step)))
    # Damage is a result, not an error: process 0 then takes an older step.
    index, count = hosts.process(), hosts.num_processes()
    damage = damage_in_share(run_folder, step, index=index, count=count, part=part)
    return hosts.reduce("verified", damage, first_known, limit_seconds=VERIFY_SECONDS)


def _require_visible(folder: pathlib.Path) -> None:
    if not folder.is_dir():
        raise UserError(
            f"there is no {folder} here, and process 0 has it; it must be on a file system that all "
            "hosts share"
        )

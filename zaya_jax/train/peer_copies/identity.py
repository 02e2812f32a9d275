"""What a run's copies have in common: their folder on each node, and the facts that they depend on."""

import dataclasses
import json
import os
import pathlib
import secrets

from zaya_jax.checkpoint.peers.copies import file_system_of, make_private_folder
from zaya_jax.config import Config, ResumeRule, resume_rule
from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.files.json_files import read_json
from zaya_jax.parallel.processes import hosts
from zaya_jax.run_folder.names import PEER_COPIES_FILE
from zaya_jax.train.consistency.same_run import code_hashes, config_values, package_versions
from zaya_jax.train.hooks.skipped_ranges import SkippedRanges

_MEMORY = ("tmpfs", "ramfs")


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """What distinguishes a run's copies from those of other runs.

    Attributes:
      place: name of the run's folder on each node; it depends on the path of the run folder, so that a copy
        of a run folder is another run.
      run: random name; a run that is removed and started again is another run.
    """

    place: str
    run: str


def run_identity(run_folder: str, *, create: bool) -> RunIdentity | None:
    """Returns the identity of a run, the same in all processes; None if it has made no copies.

    Args:
      run_folder: folder of the run.
      create: whether to create the identity if the run has none.
    """

    def read() -> list[str] | None:
        # By one process, because hosts may see the folder under different paths.
        path = pathlib.Path(run_folder) / PEER_COPIES_FILE
        if create and not path.exists():
            durable.write(path, json.dumps({"run": secrets.token_hex(16)}) + "\n")
        if not path.exists():
            return None
        return [_hash(str(path.resolve())), str(read_json(path).get("run"))]

    values = hosts.broadcast_from_first("run identity", hosts.run_on_first("run identity", read))
    return None if values is None else RunIdentity(*values)


def copies_folder(config: Config, place: str) -> pathlib.Path:
    """Returns this node's folder for the copies of a run, and creates it.

    Args:
      config: config of the run.
      place: name of the folder.

    Raises:
      UserError: if it is not in memory, although the config names no other folder, or not private.
    """
    folder = config.train.peer_copies_folder
    if folder is None:
        folder = f"/dev/shm/zaya-{os.geteuid()}"
        # A named folder may be anywhere, such as on a local NVMe disk, but not the default.
        kind = file_system_of(pathlib.Path(folder), pathlib.Path("/proc/mounts").read_text())
        if kind not in _MEMORY:
            raise UserError(
                f"train.peer_copies_every is {config.train.peer_copies_every}, and /dev/shm is no file "
                f"system in memory but {kind}; mount a tmpfs there, or name a folder in "
                "train.peer_copies_folder"
            )
    base = pathlib.Path(folder.replace("{host}", hosts.host_names()[hosts.process()]))
    make_private_folder(base)
    folder_of_run = base / place
    folder_of_run.mkdir(mode=0o700, exist_ok=True)
    return folder_of_run


def facts_of(
    config: Config, run: str, layout_fingerprint: str, skipped_ranges: SkippedRanges
) -> dict[str, str]:
    """Returns what the writer of a copy and its reader must have in common, by name in messages.

    Args:
      config: config of the run.
      run: see `RunIdentity`.
      layout_fingerprint: see `CopyLayout`.
      skipped_ranges: steps whose batches are skipped.
    """
    # Fields that a resume may always change do not decide what is learned; the layout of the state covers
    # those of them that move arrays.
    learned = {
        name: value
        for name, value in config_values(config).items()
        if resume_rule(name) is not ResumeRule.FREE
    }
    return {
        "run": run,
        "processes": str(hosts.num_processes()),
        "config": _hash(learned),
        "code": _hash(code_hashes()),
        "packages": _hash(package_versions()),
        # Also the numbers of devices and which process has which: shards are never repartitioned.
        "layout of the state": layout_fingerprint,
        # After a rollback, states before it have learned from batches that are skipped now.
        "skipped batches": _hash([list(each) for each in skipped_ranges.ranges]),
    }


def _hash(values: object) -> str:
    return durable.hash_of(json.dumps(values, sort_keys=True).encode()).hex()

"""What lies on the disk of a run: its config, and its checkpoints.

A checkpoint has two items, arrays as Orbax writes them: "weights", all that inference needs, and "training",
the rest of the state. A step is written beside the others and renamed when it is whole; one that a crash
left half-written is never taken for a checkpoint, and one that has lost a bit since is never read. Nobody
outside this room knows of Orbax's files.

`layout` has the names, `steps` writes and reads states, `manifest` tells whether a step is what was written,
`newest` which one a run goes on from, `restore` reads what inference and a new run need, `stored_weights`
reads weights part by part, and `plain_weights` says which files would hold some. `failures` makes sentences
of what a disk does, and `lock` lets one process at a time write.
"""

from zaya_jax.checkpoint.failures import SaveFailed
from zaya_jax.checkpoint.layout import FOLDER
from zaya_jax.checkpoint.lock import LOCK_FILE, RunLock, run_lock
from zaya_jax.checkpoint.manifest import damage_of
from zaya_jax.checkpoint.newest import SavedStep, newest_step, require_step, set_aside_later
from zaya_jax.checkpoint.plain_weights import PlainArray, chunk_name, metadata_files
from zaya_jax.checkpoint.restore import SavedRun, check_init_from, load_run, load_weights, read_config
from zaya_jax.checkpoint.steps import Checkpoints, has_training, restore, restore_weights
from zaya_jax.checkpoint.stored_weights import StoredWeights

__all__ = [
    "FOLDER",
    "LOCK_FILE",
    "Checkpoints",
    "PlainArray",
    "RunLock",
    "SaveFailed",
    "SavedRun",
    "SavedStep",
    "StoredWeights",
    "check_init_from",
    "chunk_name",
    "damage_of",
    "has_training",
    "load_run",
    "load_weights",
    "metadata_files",
    "newest_step",
    "read_config",
    "require_step",
    "restore",
    "restore_weights",
    "run_lock",
    "set_aside_later",
]

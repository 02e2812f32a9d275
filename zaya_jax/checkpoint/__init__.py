"""What lies on the disk of a run: its config, and its checkpoints.

A checkpoint has two items, arrays as Orbax writes them: "weights", all that inference needs, and "training",
the rest of the state. A step is written beside the others and renamed when it is whole; one that a crash
left half-written is never taken for a checkpoint, and one that has lost a bit since is never read. Nobody
outside this room knows of Orbax's files.

`layout` has the names, `steps` writes and reads states, `about` what each says of itself, `manifest` tells
whether a step is what was written, `newest` which one a run goes on from, `retention` which ones stay,
`restore` reads what inference and a new run need, `stored_arrays` and `stored_weights` read part by part,
`compare` two of them, `reshape` writes one in another form, and `plain_weights` says which files would hold
some weights. `failures` makes sentences of what a disk does, and `lock` lets one process at a time write.
"""

from zaya_jax.checkpoint.about import About, read_about
from zaya_jax.checkpoint.compare import Comparison, compare
from zaya_jax.checkpoint.failures import SaveFailed
from zaya_jax.checkpoint.layout import (
    FOLDER,
    TRAINING,
    WEIGHTS,
    all_steps,
    folder_bytes,
    step_folder,
    step_written,
)
from zaya_jax.checkpoint.lock import LOCK_FILE, RunLock, run_lock
from zaya_jax.checkpoint.manifest import all_damage, damage_of, identity_of
from zaya_jax.checkpoint.newest import (
    SavedStep,
    newest_step,
    require_present,
    require_step,
    require_whole,
    set_aside_later,
    steps_set_aside,
)
from zaya_jax.checkpoint.plain_weights import PlainArray, chunk_name, metadata_files
from zaya_jax.checkpoint.reshape import reshape
from zaya_jax.checkpoint.restore import SavedRun, check_init_from, load_run, load_weights, read_config
from zaya_jax.checkpoint.retention import Retention, rules_by_step, steps_to_remove
from zaya_jax.checkpoint.steps import (
    Checkpoints,
    devices_of,
    has_training,
    remove_step,
    restore,
    restore_weights,
)
from zaya_jax.checkpoint.stored_arrays import StoredArrays
from zaya_jax.checkpoint.stored_weights import StoredWeights

__all__ = [
    "FOLDER",
    "LOCK_FILE",
    "TRAINING",
    "WEIGHTS",
    "About",
    "Checkpoints",
    "Comparison",
    "PlainArray",
    "Retention",
    "RunLock",
    "SaveFailed",
    "SavedRun",
    "SavedStep",
    "StoredArrays",
    "StoredWeights",
    "all_damage",
    "all_steps",
    "check_init_from",
    "chunk_name",
    "compare",
    "damage_of",
    "devices_of",
    "folder_bytes",
    "has_training",
    "identity_of",
    "load_run",
    "load_weights",
    "metadata_files",
    "newest_step",
    "read_about",
    "read_config",
    "remove_step",
    "require_present",
    "require_step",
    "require_whole",
    "reshape",
    "restore",
    "restore_weights",
    "rules_by_step",
    "run_lock",
    "set_aside_later",
    "step_folder",
    "step_written",
    "steps_set_aside",
    "steps_to_remove",
]

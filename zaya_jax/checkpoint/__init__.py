"""Checkpoints of a run, and its config on disk.

A checkpoint has two items, written by Orbax: "weights", everything that inference needs, and "training", the
rest of the train state. Runs with a moving average of the weights (`config.ema`) have a third one, "ema". A
step is written under a temporary name and renamed when it is complete, so a step that a crash left incomplete
is never used; a step whose files have changed since is detected by hashes and never restored. No other
package depends on Orbax's files.

`format` has the names of files, the manifest that verifies them, the description of where a step comes
from, and weights that are written without Orbax. `steps` saves and restores, `newest` selects the step to
resume from, `shared_verification` divides the bytes to read between the processes, `retention` selects the
steps to keep. `restore` reads what inference and a new run need, `run_config` the config of a run.
`stored_arrays` and `stored_weights` read part by part, `compare` compares two checkpoints, `reshape` rewrites
one, `average` writes the mean of several. `storage_errors` turns errors of Orbax and TensorStore into
messages, and `lock` lets one process at a time write to a run folder.

The imports below are the public names of the package.
"""

from zaya_jax.checkpoint.average import average_steps, last_steps
from zaya_jax.checkpoint.compare import Comparison, compare
from zaya_jax.checkpoint.format.description import StepDescription, read_description
from zaya_jax.checkpoint.format.layout import (
    EMA,
    TRAINING,
    WEIGHTS,
    WeightsKind,
    all_steps,
    folder_bytes,
    step_folder,
    step_written,
)
from zaya_jax.checkpoint.format.manifest import all_damage, damage_of, identity_of
from zaya_jax.checkpoint.format.plain_weights import PlainArray, chunk_name, metadata_files
from zaya_jax.checkpoint.lock import RunLock, run_lock
from zaya_jax.checkpoint.newest import (
    SavedStep,
    Verify,
    newest_step,
    require_average,
    require_present,
    require_step,
    require_whole,
    set_aside_later,
    steps_set_aside,
)
from zaya_jax.checkpoint.reshape import reshape
from zaya_jax.checkpoint.restore import SavedRun, check_init_from, load_run, load_weights
from zaya_jax.checkpoint.retention import Retention, rules_by_step, steps_to_remove
from zaya_jax.checkpoint.run_config import config_loss, has_record, read_config
from zaya_jax.checkpoint.shared_verification import verified_together
from zaya_jax.checkpoint.steps import (
    Checkpoints,
    commit_together,
    devices_of,
    has_average,
    has_training,
    remove_step,
    restore,
    restore_average,
    restore_weights,
)
from zaya_jax.checkpoint.storage_errors import SaveFailed
from zaya_jax.checkpoint.stored_arrays import StoredArrays
from zaya_jax.checkpoint.stored_weights import StoredWeights

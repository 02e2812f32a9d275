"""Names of the files in a run folder, and the kinds of rows in them, which external tools read too."""

CONFIG_FILE = "config.json"
"""Resolved config of the run."""
LOCK_FILE = "lock"
CHECKPOINTS_FOLDER = "checkpoints"
TOKENIZER_FOLDER = "tokenizer"
CHANGES_FILE = "changes.jsonl"
"""Config changes of resumed runs."""
SKIPPED_RANGES_FILE = "passed_over.json"
"""Steps whose batches are skipped since a rollback."""
REFERENCE_FOLDER, REFERENCE_FILE = "reference", "reference.json"
"""Log-probabilities of preference answers under the initial weights; the file says whose weights they are."""
PROFILE_FOLDER = "profile"
"""Profiler traces. The name is the one that TensorBoard's plugin expects; each trace has a sub-folder."""
TENSORBOARD_FOLDER = "tensorboard"
TRACKERS_FILE = "sinks.json"
"""By experiment tracker: its run id, and the last step that it received."""
FAULTS_FOLDER = "faults"
"""One file per injected fault that has occurred."""

METRICS_FILE = "metrics.jsonl"
TRAIN, VALIDATION, TASKS = "train", "validation", "tasks"
"""Kinds of rows in the metrics: values of a training step, held-out losses, and scores of tasks."""
ROUTERS_FILE, ROUTER = "routers.jsonl", "router"
"""Token counts of each layer's router in some steps, and the kind of its rows."""
SAMPLES_FILE = "samples.jsonl"
"""Texts that the model generated, with their steps."""

EVENTS_FILE = "events.jsonl"
BEGAN, AT = "began", "at"
"""Kinds of events: an attempt begins at a step; it has reached a step."""
FINISHED, STOPPED, STALLED, FAILED, DIVERGED, WENT_BACK = (
    "finished",
    "stopped",
    "stalled",
    "failed",
    "diverged",
    "went back",
)
ENDS = FINISHED, STOPPED, STALLED, FAILED, DIVERGED, WENT_BACK
"""Kinds of events that end an attempt; after the last one the next attempt begins in the same processes."""
SPIKED, STARVED, SKIPPED, DAMAGED, DECIDED = "spiked", "starved", "skipped", "damaged", "decided"
"""Kinds of events in between: a loss spike, an expert without tokens, a non-finite step, a damaged
checkpoint, and a decision of the supervisor."""

SIGHTINGS_FOLDER = "sightings"
"""Observations of the agents on their nodes."""
EXCLUDED_NODES_FILE = "left_out.txt"
"""Nodes that the run must not use again, one per line."""
XLA_FOLDER = "xla"
"""XLA programs, written with `--xla-dump`."""
FILES_BEFORE_THE_RUN = EVENTS_FILE, SIGHTINGS_FOLDER, EXCLUDED_NODES_FILE, XLA_FOLDER
"""Files that may exist before the run does: its supervisor and its compiler start earlier."""

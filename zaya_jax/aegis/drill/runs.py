"""The two supervised runs of a drill, without faults and with them, and the comparison of their bits."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping

from zaya_jax.aegis.agent.sightings import read_sightings
from zaya_jax.aegis.drill.campaign import COURSE_CHANGING, WINDOW, Campaign, FaultTrial
from zaya_jax.aegis.drill.scoring import Outcome, read_truth, score_trial
from zaya_jax.aegis.watch.fault_injection import VARIABLE
from zaya_jax.checkpoint import all_steps
from zaya_jax.checkpoint.compare import compare
from zaya_jax.checkpoint.newest import SavedStep
from zaya_jax.checkpoint.stored_arrays import StoredArrays
from zaya_jax.errors import DamagedError, UserError
from zaya_jax.platform.stop_signals import on_stop_signals
from zaya_jax.run_folder.events import events_of
from zaya_jax.run_folder.names import TRAIN
from zaya_jax.train.metrics.files import read_metrics

STALL_SECONDS = 10.0
"""Time limit of the watchdog: shorter than in real training, because a drill has many hangs."""
_TIMES = ("tokens_per_second", "model_flops_utilisation")
"""Metrics that do not depend on what was learned."""
_SECONDS_PER_TRIAL = 600.0
"""Time limit of a trial on a busy machine; a run that has not ended by then never will."""


def run(folder: pathlib.Path, campaign: Campaign, faults: str) -> int:
    """Runs all steps of a campaign under the supervisor, and returns the exit code.

    Args:
      folder: run folder.
      campaign: the campaign, for the numbers of processes and steps.
      faults: faults in the words of `ZAYA_FAULT`.

    Raises:
      UserError: if the run does not end.
    """
    log, seconds = folder.with_suffix(".log"), _SECONDS_PER_TRIAL * len(campaign.trials)
    environment = _quick_compilation(folder) | os.environ | {VARIABLE: faults}
    with log.open("w") as output:
        process = subprocess.Popen(_command(folder, campaign), env=environment, stdout=output, stderr=output)
        try:
            # The supervisor saves and ends its processes.
            with on_stop_signals(process.send_signal):
                return process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise UserError(f"the run has not ended within {seconds:,.0f} s; see {log}") from None
        finally:
            process.terminate()
            process.wait()


def _quick_compilation(folder: pathlib.Path) -> dict[str, str]:
    """Returns variables for programs that compile quickly and once, as each restart needs them."""
    return {
        # The same in both runs, so that bits are comparable.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str((folder.parent / "compiled").absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _command(folder: pathlib.Path, campaign: Campaign) -> list[str]:
    fields = {
        "run_folder": folder,
        "train.num_steps": campaign.num_steps,
        "train.checkpoint_every": WINDOW,
        # Only at the end, as evaluations take time from recoveries.
        "train.eval_every": 10_000_000,
        "train.eval_sequences": 2 * campaign.processes,
        "train.log_every": 1,
        # All, to compare each with that of the other run.
        "train.keep_checkpoints": campaign.num_steps,
        "train.sample_tokens": 0,
        # Small, because every process compiles it at each restart.
        "model.num_hidden_layers": 1,
        "model.hidden_size": 32,
        "model.router": "linear",
        "model.num_experts": 2,
        "model.moe_intermediate_size": 32,
        "data.batch_size": 2 * campaign.processes,
        "data.sequence_length": 64,
        "execution.dtype": "float32",
        "watch.min_seconds": STALL_SECONDS,
        # Sensitive limits, so that spikes are detected within a few steps.
        "watch.spike_steps": 4,
        "watch.spike_deviations": 5.0,
        # Each planned spike of the loss leads to a rollback.
        "watch.max_rollbacks": 1000,
        "watch.replica_check_every": 5,
        "watch.checksums": True,
        # In such a small model experts get no tokens for a while, without any fault.
        "watch.expert_alert_lines": 1_000_000,
    }
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    # Each trial may exclude two nodes.
    nodes = campaign.processes + 2 * len(campaign.trials)
    supervise = [f"--processes={campaign.processes}", "--devices=1", f"--virtual-nodes={nodes}"]
    return [sys.executable, "-m", "zaya_jax.cli", "supervise", *supervise, "--", "train", *overrides]


def score_run(folder: pathlib.Path, reference: pathlib.Path, campaign: Campaign) -> list[Outcome]:
    """Scores the trials of a run that occurred, in their order.

    Args:
      folder: folder of the run with faults.
      reference: folder of the run without faults.
      campaign: the campaign.
    """
    # In the order of their steps, which is that of their times: a later trial waits for the recovery.
    truths = [(trial, truth) for trial in campaign.trials if (truth := read_truth(folder, trial))]
    ends = [truth.time for _, truth in truths[1:]] + [float("inf")]
    events, sightings = events_of(folder), read_sightings(folder)
    # Read once for all trials.
    rows = [_rows(each) for each in (folder, reference)]
    outcomes = []
    for (trial, truth), end in zip(truths, ends, strict=True):
        within = [event for event in events if truth.time <= event["time"] < end]
        seen = [each for each in sightings if truth.time <= each.time < end]
        is_equal = _is_equal(folder, reference, trial, rows) if _keeps_course(campaign, trial) else None
        outcomes.append(score_trial(trial, truth, within, seen, is_equal=is_equal))
    return outcomes


def _keeps_course(campaign: Campaign, trial: FaultTrial) -> bool:
    return not any(each.kind in COURSE_CHANGING and each.step <= trial.step for each in campaign.trials)


def _rows(folder: pathlib.Path) -> dict[int, Mapping[str, object]]:
    """Returns the metrics of each step that do not depend on the time."""
    rows = read_metrics(folder, TRAIN)
    return {row["step"]: {k: v for k, v in row.items() if k not in _TIMES} for row in rows}


def _is_equal(folder: pathlib.Path, reference: pathlib.Path, trial: FaultTrial, rows: list) -> bool:
    """Whether a window has the metrics of the other run, and the checkpoint at its end the bits."""
    end = trial.begin + WINDOW
    # Also the steps before the fault, which the run has repeated.
    own, other = ([each.get(step) for step in range(trial.begin + 1, end + 1)] for each in rows)
    if own != other or not all(end in all_steps(each) for each in (folder, reference)):
        return False
    # Weights, moments and counters: the metrics of a step do not show all that it has changed.
    saved = [SavedStep(str(each), end) for each in (folder, reference)]
    try:
        return all(
            compare(*(StoredArrays(each, item) for each in saved)).is_equal
            for item in ("weights", "training")
        )
    except DamagedError:
        # By a fault of the next trial, after which the run has not written it again.
        return False


def final_is_equal(folder: pathlib.Path, reference: pathlib.Path, campaign: Campaign) -> bool | None:
    """Returns whether the last checkpoints have the same weights; None if a fault has changed the course."""
    if not _keeps_course(campaign, campaign.trials[-1]):
        return None
    saved = [SavedStep(str(each), campaign.num_steps) for each in (folder, reference)]
    return compare(*(StoredArrays(each, "weights") for each in saved)).is_equal

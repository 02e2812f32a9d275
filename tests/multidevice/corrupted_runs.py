"""Small runs on eight devices, each with one planted fault, and what they report, as JSON.

It is a program, not a test, because the number of devices is fixed when jax starts; `test_corrupted_runs.py`
runs it.
"""

import contextlib
import io
import json
import pathlib
import sys
import tempfile

import numpy as np
from small_runs import build_small_corpus, small_values

from zaya_jax.aegis.watch.fault_injection import FaultInjection, parse_faults
from zaya_jax.config import Config
from zaya_jax.parallel.processes.errors import Diverged
from zaya_jax.run_folder.events import read_events
from zaya_jax.run_folder.names import CORRUPTED, REPLAY_REQUEST_FILE, REPLAYED
from zaya_jax.train.hooks.hook import Hook
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.trainer import train

FAULTS = ("flip", "flip_weight", "flip_moment", "flip_gradient", "flip_input", "stale", "lost", "miscompute")
STEP = 6


class Request(Hook):
    """Requests a repetition as `zaya aegis verify` does."""

    def on_step(self, context):
        if context.step == STEP:
            (pathlib.Path(context.config.run_folder) / REPLAY_REQUEST_FILE).touch()


def config_of(folder, corpus, **execution):
    values = small_values(run_folder=str(folder), corpus=str(corpus))
    values["model"] |= {"num_hidden_layers": 1, "layer_pattern": ("hybrid",)}
    values["train"] |= {"num_steps": 8, "checkpoint_every": 4, "eval_every": 8, "log_every": 2}
    values["data"]["batch_size"] = 8
    values["execution"] |= execution
    values["watch"] = {"checksums": True, "replay": True, "replay_every": STEP, "replica_check_every": None}
    return Config.from_dict(values)


def run(config, fault, *hooks):
    """Trains with a fault; returns what its events say, and the losses that it wrote."""
    faults = parse_faults(f"{fault}@step={STEP}:bit=2" if fault else "")
    injected = FaultInjection(faults, config.run_folder, process=0)
    diverged = None
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            train(config, hooks=[injected, *hooks])
        except Diverged as error:
            diverged = str(error)
    events = read_events(config.run_folder)
    findings = [each for event in events if event["event"] == CORRUPTED for each in event["findings"]]
    return {
        "diverged": diverged,
        "findings": [[each["step"], each["device"], each["tensor"]] for each in findings],
        "replayed": [event["reason"] for event in events if event["event"] == REPLAYED],
        "losses": [row["loss"] for row in read_metrics(config.run_folder, "train")],
        "data": [row["data_checksum"] for row in read_metrics(config.run_folder, "train")],
    }


def main(faults):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        corpus = build_small_corpus(folder / "corpus").folder
        results = {fault: run(config_of(folder / fault, corpus), fault) for fault in faults}
        results["requested"] = run(config_of(folder / "requested", corpus), "", Request())
        results["clean"] = run(config_of(folder / "clean", corpus, context_devices=2, node_devices=2), "")
        print(json.dumps(results))


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    main(sys.argv[1:] or FAULTS)

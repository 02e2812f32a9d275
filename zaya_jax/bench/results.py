"""The machine that a measurement was made on, and the output of its results."""

import datetime
import json
import pathlib
from typing import Any

import jax

from zaya_jax.files import durable
from zaya_jax.parallel.processes import hosts
from zaya_jax.plan.measured import Machine


def this_machine() -> Machine:
    """Describes the hosts and devices of all processes."""
    device = jax.devices()[0]
    return Machine(
        platform=device.platform,
        device=device.device_kind,
        # Several processes may share a host: list each host once.
        hosts=tuple(dict.fromkeys(hosts.host_names())),
        jax=jax.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def write_json(file: str | None, values: dict[str, Any]) -> None:
    """Writes the results if a file was requested; only the first process writes."""
    # All processes have the same results.
    if file is not None and hosts.is_first():
        durable.write(pathlib.Path(file), json.dumps(values, indent=2) + "\n")

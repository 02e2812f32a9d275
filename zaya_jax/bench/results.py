"""The machine that a measurement was made on, and the output of its results."""

import datetime
import json
import pathlib
from typing import Any

import jax

from zaya_jax.files import durable
from zaya_jax.options import check_output_file
from zaya_jax.parallel.processes import hosts
from zaya_jax.plan.measured import Machine
from zaya_jax.plan.output.picture import check_format


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


def check_outputs(*, json_file: str | None, picture: str | None = None) -> None:
    """Checks output files before the measurement, which takes minutes.

    Raises:
      UserError: if a file cannot be written, or the picture's format is unknown.
    """
    check_output_file("json", json_file)
    check_output_file("picture", picture)
    if picture:
        check_format(pathlib.Path(picture))


def write_json(file: str | None, values: dict[str, Any]) -> None:
    """Writes the results if a file was requested; only the first process writes."""
    # All processes have the same results.
    if file is not None and hosts.is_first():
        durable.write(pathlib.Path(file), json.dumps(values, indent=2) + "\n")

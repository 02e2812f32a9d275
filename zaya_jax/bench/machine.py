"""On what a measurement was made, as its file says it, and where the file goes."""

import datetime
import json
import pathlib
from typing import Any

import jax

from zaya_jax import durable
from zaya_jax.options import check_output_file
from zaya_jax.parallel import hosts
from zaya_jax.plan.measured import Machine
from zaya_jax.plan.picture import check_format


def this_machine() -> Machine:
    """The machines of all processes."""
    device = jax.devices()[0]
    return Machine(
        platform=device.platform,
        device=device.device_kind,
        hosts=tuple(dict.fromkeys(hosts.names())),
        jax=jax.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def check_outputs(*, json_file: str | None, picture: str | None = None) -> None:
    """Finds now what would otherwise be found after minutes of measuring.

    Raises:
      ValueError: if a file could not be written, or not in its format.
    """
    check_output_file("json", json_file)
    check_output_file("picture", picture)
    if picture:
        check_format(pathlib.Path(picture))


def write_json(file: str | None, values: dict[str, Any]) -> None:
    """Writes what was measured, where a file was asked for; one process does it for all."""
    if file is not None and hosts.is_first():
        durable.write(pathlib.Path(file), json.dumps(values, indent=2) + "\n")

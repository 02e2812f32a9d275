"""Sightings: lines of logs and sensor readings on a node that a rule has a class for.

Each host appends to its own file in the run's folder, `sightings/HOST.jsonl`.
"""

import dataclasses
import pathlib
import re

from zaya_jax.run_folder.events import append_line, is_finite, lines_of, parse_line
from zaya_jax.run_folder.names import SIGHTINGS_FOLDER

MAX_EVIDENCE = 400
"""Number of characters of the evidence that are stored."""


@dataclasses.dataclass(frozen=True)
class Sighting:
    """One line or reading.

    Attributes:
      time: Unix time in seconds.
      host: name of the node.
      name: name of its class.
      action: action of the rule of its class.
      source: log file or sensor.
      evidence: the line, or a description of the reading.
    """

    time: float
    host: str
    name: str
    action: str
    source: str
    evidence: str


def write_sighting(run_folder: str | pathlib.Path, sighting: Sighting) -> None:
    """Appends a sighting to the file of its host. Failures of the disk are ignored."""
    values = dataclasses.asdict(sighting) | {"evidence": sighting.evidence[:MAX_EVIDENCE]}
    append_line(pathlib.Path(run_folder) / SIGHTINGS_FOLDER / f"{_safe(sighting.host)}.jsonl", values)


def read_sightings(run_folder: str | pathlib.Path, *, since: float = 0.0) -> list[Sighting]:
    """Reads the sightings of all hosts, sorted by time; incomplete lines are skipped.

    Args:
      run_folder: folder of the run.
      since: Unix time in seconds; older sightings are skipped.
    """
    sightings = []
    for path in sorted((pathlib.Path(run_folder) / SIGHTINGS_FOLDER).glob("*.jsonl")):
        # A host may have been killed in the middle of a line.
        for values in map(parse_line, lines_of(path)):
            # Lines of other versions may have other fields; they are skipped like damaged ones.
            if set(values) == _FIELDS and is_finite(values["time"]):
                sightings.append(
                    Sighting(float(values.pop("time")), **{k: str(v) for k, v in values.items()})
                )
    return sorted((each for each in sightings if each.time >= since), key=lambda each: each.time)


_FIELDS = {field.name for field in dataclasses.fields(Sighting)}


def _safe(host: str) -> str:
    """Returns a host name with only characters that are safe in file names."""
    return re.sub(r"[^\w.-]", "_", host)

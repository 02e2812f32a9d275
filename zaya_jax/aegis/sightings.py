"""What was seen of a node that its run does not know: lines of logs and readings that a rule has a class for.

A file a host in the run's folder, `sightings/HOST.jsonl`, so that no two hosts write one file.
"""

import dataclasses
import pathlib
import re

from zaya_jax.aegis.journal import SIGHTINGS_FOLDER, append_line, is_finite, lines_of, parse_line

MOST_EVIDENCE = 400
"""Characters of it that are kept."""


@dataclasses.dataclass(frozen=True)
class Sighting:
    """One of them.

    Attributes:
      time: Unix time.
      host: the node.
      name: of the class that a rule has for it.
      action: of that rule.
      source: a file or a sensor.
      evidence: the line, or the reading.
    """

    time: float
    host: str
    name: str
    action: str
    source: str
    evidence: str


def write_sighting(run_folder: str | pathlib.Path, sighting: Sighting) -> None:
    """Appends a sighting to those of its host. A disk that takes none is no reason to end anything."""
    values = dataclasses.asdict(sighting) | {"evidence": sighting.evidence[:MOST_EVIDENCE]}
    append_line(pathlib.Path(run_folder) / SIGHTINGS_FOLDER / f"{_safe(sighting.host)}.jsonl", values)


def read_sightings(run_folder: str | pathlib.Path, *, since: float = 0.0) -> list[Sighting]:
    """All sightings of a run's hosts in the order of their times; half lines are left out.

    Args:
      run_folder: of the run.
      since: Unix time; older ones are left out.
    """
    found = []
    for path in sorted((pathlib.Path(run_folder) / SIGHTINGS_FOLDER).glob("*.jsonl")):
        for values in map(parse_line, lines_of(path)):
            if set(values) == _FIELDS and is_finite(values["time"]):
                found.append(Sighting(float(values.pop("time")), **{k: str(v) for k, v in values.items()}))
    return sorted((each for each in found if each.time >= since), key=lambda each: each.time)


_FIELDS = {field.name for field in dataclasses.fields(Sighting)}


def _safe(host: str) -> str:
    """A host's name as a file's."""
    return re.sub(r"[^\w.-]", "_", host)

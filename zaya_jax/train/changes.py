"""What was changed of a run while it went on: a line of JSON for each time, in the run folder."""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Iterable

from zaya_jax import durable
from zaya_jax.config import FieldChange
from zaya_jax.fields import build
from zaya_jax.json_files import parse_object

CHANGES_FILE = "changes.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedChange:
    """What a run has otherwise from a step on.

    Attributes:
      step: of the checkpoint from which it goes on so; 0 without one.
      written: when, in UTC, as ISO 8601 has it.
      has_left_its_course: whether the steps behind it are others than they would have been.
      fields: by name, the value before and the value from then on.
    """

    step: int
    written: str
    has_left_its_course: bool
    fields: dict


def record_change(
    run_folder: pathlib.Path, changed: Iterable[FieldChange], *, step: int, has_left_its_course: bool
) -> None:
    """Adds a line; whoever is killed meanwhile has added it or not."""
    change = RecordedChange(
        step=step,
        written=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        has_left_its_course=has_left_its_course,
        fields={each.name: [each.old, each.new] for each in changed},
    )
    path = run_folder / CHANGES_FILE
    # Not appended: half a line, behind a kill, would make the whole file one that cannot be read.
    before = path.read_text() if path.exists() else ""
    durable.write(path, f"{before}{json.dumps(dataclasses.asdict(change))}\n")


def read_changes(run_folder: str | pathlib.Path) -> list[RecordedChange]:
    """All changes of a run, the first one first.

    Raises:
      ValueError: for a line that `record_change` did not write.
    """
    path = pathlib.Path(run_folder) / CHANGES_FILE
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    return [
        build(RecordedChange, parse_object(line, f"{path}:{n}"), "") for n, line in enumerate(lines, start=1)
    ]

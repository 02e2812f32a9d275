"""The merge of the indexes of all processes into one, which process 0 does before a commit.

`zaya bench control` starts it as `python -m zaya_jax.bench.control.merge COUNT FOLDER`, and it writes
FOLDER/merge.json: another program, which leaves the devices of this one alone.
"""

import dataclasses
import json
import pathlib
import shutil
import sys
import time
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import orbax.checkpoint as ocp
import tensorstore as ts

from zaya_jax.bench.control.phases import ARRAYS, ITEMS, STEP, PhaseCost
from zaya_jax.checkpoint.format.manifest import Files
from zaya_jax.checkpoint.steps import StepWriter
from zaya_jax.files import durable

RESULT_FILE = "merge.json"


def main(argv: Sequence[str]) -> None:
    """Measures the merge for a number of processes."""
    count, folder = int(argv[0]), pathlib.Path(argv[1]).absolute()
    aside = durable.temporary_path(folder / str(STEP))
    try:
        cost = measure(count, aside)
    # Also after an error: the folder is on the disk of checkpoints.
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    durable.write(folder / RESULT_FILE, json.dumps(dataclasses.asdict(cost)))


def measure(count: int, aside: pathlib.Path) -> PhaseCost:
    """Times the merge of a step that a number of processes have written, with arrays of a few bytes."""
    writer = StepWriter(aside, STEP, None)
    arrays = {f"array_{number:02d}": jnp.zeros((1, 1)) for number in range(ARRAYS)}
    writer.begin({item: ocp.args.StandardSave(arrays) for item in ITEMS})
    own = writer.finish()
    # Small arrays: only their number matters to an index.
    for item in ITEMS:
        for process in range(1, count):
            _write_as(process, aside / item, arrays)
    described = [own, *(_described_by(process, aside, own) for process in range(1, count))]
    begin, cpu = time.monotonic(), time.process_time()
    writer.merge(described)
    return PhaseCost(time.monotonic() - begin, 0, 0, time.process_time() - cpu)


def _write_as(process: int, item: pathlib.Path, names: Iterable[str]) -> None:
    """Writes what Orbax writes in another process: an index with its part of each array, and shapes."""
    base = f"file://{item / f'ocdbt.process_{process}'}/"
    index = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    # In one transaction, as Orbax: otherwise each array would be a version of the index.
    transaction = ts.Transaction()
    for name in names:
        index.with_transaction(transaction)[f"{name}/{process}.0"] = b"values"
    transaction.commit_async().result()
    # All processes note the same shapes.
    shapes = item / "array_metadatas"
    shutil.copy(shapes / "process_0", shapes / f"process_{process}")


def _described_by(process: int, aside: pathlib.Path, own: Files) -> Files:
    """Describes the files of another process that a merge looks at, like `StepWriter.finish` there."""
    files = {}
    for name, values in own.items():
        name = name.replace("process_0", f"process_{process}")
        # The shapes are the same; an index has other parts, and the names of its data differ.
        if (aside / name).exists():
            files[name] = values | {"bytes": (aside / name).stat().st_size}
    return files


if __name__ == "__main__":
    main(sys.argv[1:])

"""A checkpoint of four processes, of which two write what all have."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from groups import finish, start_words
from saved_by_groups import SHAPES, STEPS, values

from zaya_jax.checkpoint import all_steps, damage_of

PROGRAM = pathlib.Path(__file__).with_name("saved_by_groups.py")
LAUNCH = (
    "import sys; from zaya_jax.parallel.processes.launch import *; "
    "sys.exit(launch(Launch(sys.argv[1:], num_processes=4, devices=1)))"
)
ITEMS = ("weights", "training", "ema")
HERE = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    code, output = finish(
        start_words([sys.executable, "-c", LAUNCH, sys.executable, str(PROGRAM), str(folder)])
    )
    assert code == 0, output
    return folder


def test_the_first_process_of_each_group_writes(folder):
    assert all_steps(folder) == [2, 3]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["2", "3"]
    for step in STEPS[1:]:
        assert damage_of(folder, step) is None
        for item in ITEMS:
            place = folder / f"checkpoints/{step}/{item}"
            assert {path.name for path in place.glob("ocdbt.*")} == {"ocdbt.process_0", "ocdbt.process_2"}
            assert {path.name for path in (place / "array_metadatas").iterdir()} == {"process_0", "process_2"}


@pytest.mark.parametrize("step", STEPS[1:])
@pytest.mark.parametrize("item", ITEMS)
def test_orbax_reads_what_all_processes_had(folder, step, item):
    target = {name: jax.ShapeDtypeStruct(shape, "float32", sharding=HERE) for name, shape in SHAPES.items()}
    if item == "training":
        key, count = jax.eval_shape(lambda: (jax.random.key(0), jnp.int32(0)))
        others = {"key": key, "num_devices": count}
        target |= {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=HERE) for n, x in others.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        read = checkpointer.restore(folder.absolute() / f"checkpoints/{step}/{item}", target)
    for name in SHAPES:
        np.testing.assert_array_equal(read[name], values(-step % 7 if item == "ema" else step, name))
    if item == "training":
        assert read["num_devices"] == 4
        assert (jax.random.key_data(read["key"]) == jax.random.key_data(jax.random.key(step))).all()

"""The house: a room imports only rooms above it, and one room alone knows of a mesh."""

import ast
import inspect
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import jaxtyping
import pytest

import pallas_kernels
import zaya_jax
from zaya_jax.model.rope import rope_table

PACKAGE = pathlib.Path(zaya_jax.__file__).parent
KERNELS = pathlib.Path(pallas_kernels.__path__[0])
ROOMS = [
    "fields",
    "pytree",
    "tables",
    "progress",
    "platform",
    "durable",
    "json_files",
    "config",
    "config_help",
    "options",
    "verbs",
    "parallel",
    "model",
    "optim",
    "data",
    "checkpoint",
    "aegis",
    "convert",
    "train",
    "inference",
    "serving",
    "plan",
    "bench",
    "report",
    "train_command",
    "launch_command",
    "supervise_command",
    "checkpoint_command",
    "doctor_command",
    "completion",
    "cli",
    "site",
]
"""From the ground up, as CONTRIBUTING.md has them; below them all are the kernels."""
MESH_NAMES = {
    "PartitionSpec", "NamedSharding", "Mesh", "make_mesh", "shard_map", "axis_index", "axis_size",
    "psum", "pmean", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "psum_scatter",
}  # fmt: skip


def files(folder):
    found = sorted(folder.rglob("*.py"))
    assert found
    return found


def room_of(file):
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(file):
    """Full names of modules that a file imports, at its top or later."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_room_is_in_the_list():
    rooms = {room_of(file) for file in files(PACKAGE)} - {"__init__", "configs"}
    assert rooms <= set(ROOMS)


@pytest.mark.parametrize("file", files(PACKAGE), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_rooms_import_only_rooms_above_them(file):
    if room_of(file) == "__init__":
        return  # the package's front door shows names of all rooms
    ours = [name.split(".") for name in imported(file) if name.split(".")[0] == "zaya_jax"]
    assert all(len(name) > 1 for name in ours), "rooms import from rooms, not from the front door"
    below = [".".join(name) for name in ours if ROOMS.index(name[1]) > ROOMS.index(room_of(file))]
    assert not below


def test_the_front_door_has_what_it_names_and_waits_for_no_jax():
    assert set(zaya_jax._MODULES) == set(zaya_jax.__all__)
    assert all(getattr(zaya_jax, name).__name__ == name for name in zaya_jax.__all__)
    look = "import sys, zaya_jax.cli; print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", look], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("file", files(KERNELS), ids=lambda file: str(file.relative_to(KERNELS)))
def test_kernels_stand_alone(file):
    assert not [name for name in imported(file) if name.split(".")[0] == "zaya_jax"]


@pytest.mark.parametrize(
    "file", files(PACKAGE) + files(KERNELS), ids=lambda file: f"{file.parent.name}/{file.name}"
)
def test_only_parallel_names_a_mesh_axis(file):
    """Others may pass a mesh on: an annotation names `Mesh`, but nobody builds one or an axis of it."""
    if file.is_relative_to(PACKAGE / "parallel"):
        return
    calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    names = {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", None) for call in calls}
    # `all_gather` is a name of ours too: what comes from the room that names the axis may be called.
    ours = {name.rpartition(".")[2] for name in imported(file) if name.startswith("zaya_jax.parallel.")}
    assert not (names - ours) & MESH_NAMES
    assert "DATA" not in ours


def test_parallel_stands_on_jax_alone():
    """So that the network may call its collectives."""
    for file in files(PACKAGE / "parallel"):
        names = {name for name in imported(file) if not name.startswith("zaya_jax.parallel")}
        assert {name.split(".")[0] for name in names} <= {*sys.stdlib_module_names, "jax", "numpy"}


def test_parallel_is_where_they_are():
    """The names above are the ones that the code uses; another spelling would find nothing."""
    text = (PACKAGE / "parallel" / "mesh.py").read_text()
    assert {name for name in MESH_NAMES if f"{name}(" in text} >= {
        "PartitionSpec",
        "Mesh",
        "shard_map",
        "psum",
    }


def test_annotations_are_checked_in_tests():
    with pytest.raises(jaxtyping.TypeCheckError, match="positions_BT"):
        rope_table(jnp.ones((2, 3)), theta=1e4, rotary_dim=4)
    assert inspect.unwrap(rope_table) is not rope_table

"""The layers: a package imports only packages below it, and one package alone names mesh axes."""

import ast
import inspect
import re
import subprocess
import sys

import jax.numpy as jnp
import jaxtyping
import pytest
from source_files import KERNELS, PACKAGE, ROOT, imported_names, modules, python_files, tree_of

import zaya_jax
from zaya_jax.model.rope import rope_table

PACKAGES = [
    "errors",
    "fields",
    "pytree",
    "text_tables",
    "progress",
    "platform",
    "files",
    "html_page",
    "run_folder",
    "config",
    "config_help",
    "help_formatter",
    "options",
    "parallel",
    "model",
    "optim",
    "data",
    "checkpoint",
    "convert",
    "train",
    "aegis",
    "inference",
    "serving",
    "plan",
    "bench",
    "report",
    "commands",
    "completion",
    "cli",
    "site",
]
"""Modules and packages of `zaya_jax`, lowest first, as in CONTRIBUTING.md. Kernels are below all of them."""
MESH_NAMES = {
    "PartitionSpec", "NamedSharding", "Mesh", "make_mesh", "shard_map", "axis_index", "axis_size",
    "psum", "pmean", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "psum_scatter",
}  # fmt: skip
PARALLEL_MAY_IMPORT = ("zaya_jax.parallel", "zaya_jax.errors", "zaya_jax.platform.stop_signals")
PLATFORM_WORDS = re.compile(
    r"\b(?:CPUs?|ROCm|CUDA|platform_dependent|default_backend|optimization_barrier)\b", re.IGNORECASE
)
"""Words that belong into an implementation of an operation; the network must not depend on a platform."""


def package_of(file) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def test_every_package_is_in_the_list():
    packages = {package_of(file) for file in python_files(PACKAGE)} - {"__init__", "configs"}
    assert packages <= set(PACKAGES)


def test_packages_import_only_packages_below_them():
    wrong = []
    for file in python_files(PACKAGE):
        if package_of(file) == "__init__":
            continue  # the public names come from all packages
        ours = [name.split(".") for name in imported_names(file) if name.split(".")[0] == "zaya_jax"]
        assert all(len(name) > 1 for name in ours), f"{file} imports from the top package"
        allowed = PACKAGES[: PACKAGES.index(package_of(file)) + 1]
        wrong += [f"{file}: {'.'.join(name)}" for name in ours if name[1] not in allowed]
    assert not wrong


def test_contributors_read_of_packages_in_this_order():
    table = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"^\| `zaya_jax/(\w+)(?:/|\.py)` \|", table, re.MULTILINE)
    assert len(named) > 10
    assert named == [package for package in PACKAGES if package in named]


def test_public_names_exist_and_do_not_import_jax_early():
    names = {"Config", "ModelConfig", "Zaya", "generate", "load_pytorch", "save_pytorch", "train_step"}
    assert names <= set(dir(zaya_jax))
    assert all(getattr(zaya_jax, name).__name__ == name for name in names)
    program = "import sys, zaya_jax.cli; print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "False\n", done.stderr


def test_kernels_import_nothing_of_the_package():
    names = {(file, name) for file in python_files(KERNELS) for name in imported_names(file)}
    assert not {pair for pair in names if pair[1].split(".")[0] == "zaya_jax"}


def test_only_parallel_names_a_mesh_axis():
    """Others may pass a mesh on: an annotation names `Mesh`, but no call builds one or an axis of it."""
    wrong = {}
    for file in python_files():
        if file.is_relative_to(PACKAGE / "parallel"):
            continue
        calls = [node.func for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call)]
        called = {
            call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", None) for call in calls
        }
        # A function of `zaya_jax.parallel` may have the name of a collective, such as `all_gather`.
        ours = {
            name.rpartition(".")[2] for name in imported_names(file) if name.startswith("zaya_jax.parallel.")
        }
        if ((called - ours) & MESH_NAMES) or "DATA" in ours:
            wrong[file] = (called - ours) & MESH_NAMES
    assert not wrong


def test_the_mesh_names_are_those_that_the_code_uses():
    """With another spelling the test above would find nothing."""
    text = (PACKAGE / "parallel" / "mesh.py").read_text()
    used = {name for name in MESH_NAMES if f"{name}(" in text}
    assert used >= {"PartitionSpec", "Mesh", "shard_map", "psum"}


def test_parallel_depends_on_jax_alone():
    """So that the network can call its collectives."""
    for file in python_files(PACKAGE / "parallel"):
        others = {name for name in imported_names(file) if not name.startswith(PARALLEL_MAY_IMPORT)}
        allowed = {*sys.stdlib_module_names, "jax", "jaxlib", "jaxtyping", "numpy"}
        assert {name.split(".")[0] for name in others} <= allowed, file


def import_cycle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a cycle, without those that only lead to it; empty if none does."""
    left = dict(imports)
    while leaves := [name for name, used in left.items() if not used & left.keys()]:
        left = {name: used for name, used in left.items() if name not in leaves}
    while roots := [name for name in left if not any(name in used for used in left.values())]:
        left = {name: used for name, used in left.items() if name not in roots}
    return sorted(left)


def test_no_import_cycles():
    """An import within a function counts: it hides a cycle, it does not remove it."""
    known = modules()
    imports = {
        name: {full if full in known else full.rpartition(".")[0] for full in imported_names(file)}
        & known.keys()
        for name, file in known.items()
    }
    assert not import_cycle(imports)
    assert import_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set(), "b2": {"a"}}) == ["b", "c"]


def test_the_network_names_no_platform():
    words = {file: PLATFORM_WORDS.findall(file.read_text()) for file in python_files(PACKAGE / "model")}
    assert not {file: each for file, each in words.items() if each}


def test_annotations_are_checked_in_tests():
    with pytest.raises(jaxtyping.TypeCheckError, match="positions_BT"):
        rope_table(jnp.ones((2, 3)), theta=1e4, rotary_dim=4)
    assert inspect.unwrap(rope_table) is not rope_table

"""Checks every annotation of shape and dtype at run time, in all tests.

The hook rewrites modules as they are imported, so nothing of ours may be imported before it.
"""

import sys

import jax
import jaxtyping
import pytest
from quick_compilation import compile_quickly

PACKAGES = ["zaya_jax", "pallas_kernels"]

_early = sorted(name for name in sys.modules if name.partition(".")[0] in PACKAGES)
if _early:
    raise ImportError(f"{_early} were imported before the hook that checks their annotations")
jaxtyping.install_import_hook(PACKAGES, "beartype.beartype")
compile_quickly()  # before anything asks jax for its devices


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_functions():
    """Those of a test file, behind it.

    Each takes some mappings of memory. Linux gives a process 65,530 of them, and the compiler crashes
    at the next one.
    """
    yield
    jax.clear_caches()


LONGEST_FIRST = (
    "train/test_tiny_with_kernels.py", "train/test_step.py", "train/test_run.py", "model/test_properties.py",
    "notebooks/test_notebooks.py", "multidevice/test_multidevice.py",
)  # fmt: skip
"""Files that take minutes. Begun last, one of them would end alone, with the other cores idle."""


def pytest_collection_modifyitems(items):
    """Begins with the longest files; `--no-loadscope-reorder` has xdist keep that order."""
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get("/".join(item.path.parts[-2:]), len(ranks)))

"""Checks every annotation of shape and dtype at run time, in all tests.

The hook rewrites modules as they are imported, so nothing of ours may be imported before it.
"""

import gc
import pathlib
import signal
import sys

import quick_compilation

quick_compilation.compile_quickly()
quick_compilation.keep_programs()
# Tracing makes millions of objects and hardly any cycles. With Python's default threshold of 700 the
# collector traverses jax and torch every few seconds, which takes a tenth of the time.
gc.set_threshold(50_000, 20, 100)

import jax  # noqa: E402  (it reads the environment as it is imported)
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

PACKAGES = ["zaya_jax", "pallas_kernels"]
UNCHECKED = "emulator"
"""Part of `pallas_kernels` without shapes in its annotations: it makes millions of calls, which checks make
several times as slow."""

_early = sorted(name for name in sys.modules if name.partition(".")[0] in PACKAGES)
if _early:
    raise ImportError(f"{_early} were imported before the hook that checks their annotations")
_kernels = pathlib.Path(__file__).parents[1] / "pallas_kernels"
_checked = [f"pallas_kernels.{path.stem}" for path in _kernels.iterdir() if path.stem != UNCHECKED]
jaxtyping.install_import_hook(["zaya_jax", *_checked], "beartype.beartype")

MAPPINGS = pathlib.Path("/proc/self/maps")
MAX_MAPPINGS = 20_000


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_functions():
    """Drops all compiled functions after a test file once there are many.

    Each needs some memory mappings. Linux allows 65,530 of them per process, and the compiler crashes at the
    next one; a file of tests needs less than half of them.
    """
    yield
    if not MAPPINGS.exists() or MAPPINGS.read_bytes().count(b"\n") > MAX_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def _restore_signals():
    """Undoes what a command that a test calls sets for its process, which it expects to be its own.

    `zaya serve` counts signals until it exits, and ends the process some time after the second one: the tests
    of a later file, which send signals to their own process, ended silently.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        if handler is not None:  # Python did not set it, and cannot set it again
            signal.signal(number, handler)


LONGEST_FIRST = (
    "multidevice/test_multidevice.py", "runs/test_run.py", "multiprocess/test_runs.py",
    "multidevice/test_shared_sequences.py", "train/test_step.py", "model/test_properties.py",
    "notebooks/test_notebooks.py", "rocm/test_train_step.py",
    "kernels/test_gfx942_cca.py", "model/test_kernels_in_the_network.py",
    "multidevice/test_reading_of_runs.py",
    "tests/test_golden_loss.py", "rocm/test_kernel_resources.py", "engine/test_generate.py",
)  # fmt: skip
"""Files that take a minute or two. Started last, one of them would run alone on one core."""


def pytest_addoption(parser):
    parser.addoption("--first-cases", action="store_true", help="run one case of each parametrized test")


def pytest_collection_modifyitems(config, items):
    """Sorts the longest files first; with `--no-loadscope-reorder` xdist keeps that order."""
    if config.getoption("--first-cases"):
        firsts = {}
        for item in items:
            firsts.setdefault((item.path, getattr(item, "originalname", item.name)), item)
        config.hook.pytest_deselected(items=[item for item in items if item not in firsts.values()])
        items[:] = firsts.values()
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get("/".join(item.path.parts[-2:]), len(ranks)))

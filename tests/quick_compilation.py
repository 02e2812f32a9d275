"""Fast compilation in tests, and the cache of compiled programs.

Compilation is nearly all of the tests' time, and few of their programs run twice. The settings are
environment variables that are set before jax reads them, so that workers and the processes that tests start
have the same.

- `XLA_FLAGS`: the user's flags come after ours and win; `XLA_FLAGS=--xla_backend_optimization_level=3`
  compiles as a run does.
- `ZAYA_TESTS_COMPILED`: folder of compiled programs, by default in the user's cache folder; if it is empty,
  there is no cache, and every program is compiled as on a new machine.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil

FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jax").startswith("0.10."):  # later versions reject unknown flags
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
"""No LLVM passes, and XLA's older emitter of fused loops, which skips MLIR: a train step compiles in 4 s of
CPU time, with the first flag alone in 9 s, with neither in 17 s. In one part: 32 parts, the default, are for
idle cores, and take a sixth more CPU time."""

FOLDER = "JAX_COMPILATION_CACHE_DIR"
LARGEST_FOLDER = 2 * 2**30


def compile_quickly() -> None:
    """Sets XLA's flags, except on a machine with a GPU, whose code they would slow down."""
    flags = os.environ.get("XLA_FLAGS", "")
    if importlib.util.find_spec("jax_plugins") is None and FLAGS not in flags:
        os.environ["XLA_FLAGS"] = f"{FLAGS} {flags}".strip()


def keep_programs() -> None:
    """Makes jax cache each program that it compiles.

    The key contains the program, without the names of source locations and scopes, and the compiler's options
    and version. A test that reads such names from a compiled program deletes `FOLDER` from the environment.
    """
    os.environ["ZAYA_PROGRAM_CACHE"] = ""  # the user's cache is not for tests
    folder = os.environ.get("ZAYA_TESTS_COMPILED", str(_default_folder()))
    if not folder or FOLDER in os.environ:
        return
    if "PYTEST_XDIST_WORKER" not in os.environ and _num_bytes(pathlib.Path(folder)) > LARGEST_FOLDER:
        shutil.rmtree(folder, ignore_errors=True)
    os.environ |= {
        FOLDER: folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",  # smaller ones compile as fast
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _default_folder() -> pathlib.Path:
    """Returns a name of this kind of machine: several may share a home folder, and code for one may crash
    another.
    """
    cpu = pathlib.Path("/proc/cpuinfo")
    about = cpu.read_text().partition("\n\n")[0] if cpu.exists() else platform.processor()
    lines = [line for line in about.splitlines() if line.startswith(("flags", "Features", "model"))]
    kind = hashlib.sha256("\n".join([platform.machine(), *lines]).encode()).hexdigest()[:12]
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return cache / "zaya_jax" / "tests" / kind


def _num_bytes(folder: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*"))

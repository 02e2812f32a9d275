"""How the tests compile: quickly, and what was compiled before they read from disk.

Compiling is nearly all their time, and few of their programs run twice. What is set here is set in the
environment, before jax reads it, so that workers and the processes that tests start do the same.

- `XLA_FLAGS`: those of the user come behind ours and win; `XLA_FLAGS=--xla_backend_optimization_level=3`
  compiles as a run does.
- `ZAYA_TESTS_COMPILED`: the folder of compiled programs, beside the user's other caches if it is not set;
  empty, there is none, and every program is compiled as on a new machine.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil

FLAGS = "--xla_backend_optimization_level=0"
if importlib.metadata.version("jax").startswith("0.10."):  # later ones stop at a flag that they do not know
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
"""LLVM's passes left out, and fused loops written by XLA's older emitter, which skips MLIR: a train step
compiles in 4 s of CPU time, with the first alone in 9, with neither in 17."""

FOLDER = "JAX_COMPILATION_CACHE_DIR"
LARGEST_FOLDER = 2 * 2**30


def compile_quickly() -> None:
    """Sets XLA's flags; where there is a GPU, whose code they would slow down, nothing."""
    flags = os.environ.get("XLA_FLAGS", "")
    if importlib.util.find_spec("jax_plugins") is None and FLAGS not in flags:
        os.environ["XLA_FLAGS"] = f"{FLAGS} {flags}".strip()


def keep_programs() -> None:
    """Has jax keep each program that it compiles.

    Its key is the program, without the names of places and scopes in the source, beside the options of
    the compiler and its version. A test that reads such names from a compiled program deletes `FOLDER`
    from the environment.
    """
    folder = os.environ.get("ZAYA_TESTS_COMPILED", str(_default_folder()))
    if not folder or FOLDER in os.environ:
        return
    if "PYTEST_XDIST_WORKER" not in os.environ and _num_bytes(pathlib.Path(folder)) > LARGEST_FOLDER:
        shutil.rmtree(folder, ignore_errors=True)
    os.environ |= {
        FOLDER: folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",  # a smaller one is read no faster than compiled
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _default_folder() -> pathlib.Path:
    """Of this kind of machine: a home may be mounted on several, and code for one be illegal on another."""
    cpu = pathlib.Path("/proc/cpuinfo")
    about = cpu.read_text().partition("\n\n")[0] if cpu.exists() else platform.processor()
    lines = [line for line in about.splitlines() if line.startswith(("flags", "Features", "model"))]
    kind = hashlib.sha256("\n".join([platform.machine(), *lines]).encode()).hexdigest()[:12]
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return cache / "zaya_jax" / "tests" / kind


def _num_bytes(folder: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*"))

"""What the tests tell XLA: to compile quickly. That is nearly all their time, and few programs run twice.

XLA reads `XLA_FLAGS` once in a process, and processes that tests start inherit it. Flags of the user come
behind ours, so that they win: `XLA_FLAGS=--xla_backend_optimization_level=3` compiles as a run does.
"""

import importlib.util
import os

import jax

OPTIONS: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later ones have no such option, and stop at a flag they do not know
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
"""LLVM's passes left out, and fused loops written by XLA's older emitter, which skips MLIR: a train step
compiles in 4 s of CPU time, with the first alone in 9, with neither in 17."""

FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())


def compile_quickly() -> None:
    """Sets the flags of this process and of those it starts; they must not reach a compiler for GPUs."""
    if importlib.util.find_spec("jax_plugins") is None:
        os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()

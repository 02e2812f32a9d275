"""Which implementation an operation takes: what can be named, and what None means on which platform.

An entry of the table rests on a time that was measured on the named hardware, or says that it is
unmeasured. No entry prefers a kernel because it is ours.
"""

import dataclasses
import functools
import importlib.util
import logging
from typing import Any

import jax

_GROUPED = ("pallas", "xla", "blocked", "ragged_dot", "ragged_dot+pallas", "primus_turbo")
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "cca": ("pallas", "xla"),
    "cross_entropy": ("pallas", "xla"),
    "decode_attention": ("pallas", "xla"),
    "flash_attention": ("pallas", "xla", "full", "blockwise"),
    "grouped_matmul": _GROUPED,
    "grouped_swiglu": _GROUPED,
    "newton_schulz": ("pallas", "xla"),
    "residual_rms_norm": ("pallas", "xla"),
}
"""By operation, all that can be named. A vendor's joins as a name here, with its package below, and as one
file in the operation's folder that imports the package where it is called."""
PACKAGES = {"primus_turbo": "primus_turbo"}
"""Python packages that an implementation needs beside jax."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """An implementation and the reason for it."""

    implementation: str
    basis: str


INTERPRETED = Choice("xla", "Pallas kernels are only interpreted on CPUs, for tests")
UNMEASURED = Choice("xla", "unmeasured: no time on this platform yet, so that XLA's own form is taken")
# AMD's figures are of MI355X and of its own Triton kernel; ours was compiled for gfx942 and never timed.
BY_DIRECTION = Choice(
    "ragged_dot+pallas",
    "unmeasured: AMD reports hipBLASLt ahead of Triton forward (1,320 and 1,165 TFLOP/s on MI355X) and "
    "behind it in gradients (626 and 1,092)",
)
FEW_ROWS = Choice(
    "pallas",
    "unmeasured: the vendor's grouped product has a fixed cost of about 1.5 ms, too much for decoding",
)
TABLE = {
    ("cca", "rocm"): Choice(
        "pallas",
        "unmeasured: a step of zaya1_8b, compiled with 4 x 4,096 tokens a GPU, moves 748 GB, not 868",
    ),
    ("grouped_matmul", "rocm"): BY_DIRECTION,
    ("grouped_swiglu", "rocm"): BY_DIRECTION,
    ("grouped_matmul of few rows", "rocm"): FEW_ROWS,
    ("grouped_swiglu of few rows", "rocm"): FEW_ROWS,
    ("residual_rms_norm", "rocm"): Choice(
        "pallas",
        "unmeasured: a step of zaya1_8b, compiled for 1,024 GPUs with 4 x 4,096 tokens each, takes 479 ms by "
        "zaya plan's model, not 496: less is waited for in the node",
    ),
    ("flash_attention", "rocm"): Choice(
        "pallas",
        "unmeasured: XLA has no fused form there and keeps all scores, 3 GiB for 4 x 8 heads x 4096 squared",
    ),
}
"""By operation and platform. Where there is no entry, it is unmeasured, and XLA's form is taken."""
WIDEST = {"flash_attention": 256, "decode_attention": 256, "residual_rms_norm": 16_384}
"""Channels of a head or of a row that a kernel takes, where it holds all of them at once."""


def choose(
    operation: str,
    implementation: str | None,
    *,
    platform: str | None = None,
    width: int = 0,
    has_few_rows: bool = False,
) -> Any:
    """The implementation to trace; None becomes the table's entry.

    Args:
      operation: name of the public function.
      implementation: what its caller asked for.
      platform: that the program is for: "cpu", "cuda" or "rocm". None is the one that runs here; who
        compiles for another one must name it.
      width: channels of a head or of a row. None takes no kernel for more than `WIDEST`.
      has_few_rows: whether so few tokens come that fixed costs count, as in decoding.

    Raises:
      ValueError: if there is no such implementation, or its package is not installed.
    """
    if implementation is None:
        if width > WIDEST.get(operation, width):
            return "xla"
        platform = platform or platform_of(jax.devices()[0])
        few = f"{operation} of few rows"
        case = few if has_few_rows and (few, platform) in TABLE else operation
        return _of_platform(case, platform).implementation
    _check(operation, implementation)
    return implementation


def _check(operation: str, implementation: str) -> None:
    known = IMPLEMENTATIONS[operation]
    if implementation not in known:
        names = ", ".join(f'"{name}"' for name in known)
        raise ValueError(f'{operation}: implementation is "{implementation}"; it must be {names} or None')
    package = PACKAGES.get(implementation)
    # Never another path in silence: who names a vendor's operation wants its speed.
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(
            f'{operation}: implementation is "{implementation}", which needs the package {package}, and that '
            "is not installed here; install it, or name another"
        )


def choice_for(operation: str, platform: str) -> Choice:
    """The table's entry. A GPU is called "gpu" by JAX, "cuda" or "rocm" here."""
    return INTERPRETED if platform == "cpu" else TABLE.get((operation, platform), UNMEASURED)


@functools.cache
def _of_platform(operation: str, platform: str) -> Choice:
    """The choice, told once a process."""
    choice = choice_for(operation, platform)
    logging.getLogger("pallas_kernels").info(
        "%s on %s: %s (%s)", operation, platform, choice.implementation, choice.basis
    )
    return choice


def platform_of(device: Any) -> str:
    """Of a device that is here, or of one that is only described: JAX calls both makers' GPUs "gpu"."""
    if device.platform != "gpu":
        return device.platform
    said = f"{device.client.platform_version} {device.device_kind}".lower()
    return "rocm" if "rocm" in said or "amd" in said else "cuda"

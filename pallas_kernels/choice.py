"""Selects the implementation of an operation: the names that exist, and the default for each platform.

Each entry of the table cites a time that was measured on the named hardware, or says that it is unmeasured.
No entry prefers a kernel because it is ours.
"""

import dataclasses
import functools
import importlib.util
import logging
from typing import Any

import jax

from pallas_kernels.errors import ArgumentError

_GROUPED = ("pallas", "xla", "blocked", "ragged_dot", "ragged_dot+pallas", "primus_turbo")
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "cca": ("pallas", "xla"),
    "cross_entropy": ("pallas", "xla", "pallas+xla"),
    "decode_attention": ("pallas", "xla"),
    "flash_attention": ("pallas", "xla", "full", "blockwise"),
    "grouped_feed_forward": _GROUPED,
    "grouped_matmul": _GROUPED,
    "grouped_swiglu": _GROUPED,
    "newton_schulz": ("pallas", "xla"),
    "residual_rms_norm": ("pallas", "xla"),
}
"""Names of the implementations of each operation. To add a vendor's: a name here, its package in `PACKAGES`,
and one file in the operation's folder, which imports the package where it calls it."""
PACKAGES = {"primus_turbo": "primus_turbo"}
"""Python packages, in addition to jax, that an implementation needs."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """An implementation and the reason for choosing it.

    Attributes:
      implementation: name of the implementation.
      basis: the measurement behind the choice, or "unmeasured" and an argument.
    """

    implementation: str
    basis: str


INTERPRETED = Choice("xla", "Pallas kernels are only interpreted on CPUs, for tests")
UNMEASURED = Choice("xla", "unmeasured: no time on this platform yet, so that XLA's code is used")
# AMD measured its own Triton kernel on MI355X; ours was compiled for gfx942 and never timed.
BY_DIRECTION = Choice(
    "ragged_dot+pallas",
    "unmeasured: AMD reports hipBLASLt faster than Triton forward (1,320 and 1,165 TFLOP/s on MI355X) "
    "and slower in gradients (626 and 1,092)",
)
FEW_ROWS = Choice(
    "pallas",
    "unmeasured: the vendor's grouped product has a fixed cost of about 1.5 ms, too much for decoding",
)
ON_H200 = "measured on one H200, sizes of zaya1_8b with gradients: "
TABLE = {
    ("cca", "cuda"): Choice("pallas", ON_H200 + "0.55 ms, 1.29 by XLA"),
    ("cross_entropy", "cuda"): Choice("xla", ON_H200 + "86 ms, 99 with our kernel for the logits"),
    ("decode_attention", "cuda"): Choice("xla", "measured on one H200: 0.157 ms, 0.154 by the kernel"),
    ("flash_attention", "cuda"): Choice("pallas", ON_H200 + "2.6 ms, 12.9 by XLA; cuDNN takes 1.1"),
    ("grouped_feed_forward", "cuda"): Choice("pallas", ON_H200 + "4.7 ms, 29.6 by XLA"),
    ("grouped_feed_forward of few rows", "cuda"): Choice(
        "pallas", "measured on one H200, 16 rows: 0.106 ms, 0.112 by XLA"
    ),
    ("grouped_matmul", "cuda"): Choice("pallas", ON_H200 + "1.7 ms, 9.3 by XLA"),
    ("grouped_swiglu", "cuda"): Choice("pallas", ON_H200 + "2.9 ms, 20.1 by XLA"),
    ("newton_schulz", "cuda"): Choice("pallas", ON_H200 + "2.2 ms, 2.4 by XLA"),
    ("residual_rms_norm", "cuda"): Choice("xla", ON_H200 + "0.31 ms, 0.48 by the kernel"),
    ("cca", "rocm"): Choice(
        "pallas",
        "unmeasured: a step of zaya1_8b, compiled with 4 x 4,096 tokens a GPU, moves 748 GB, not 868",
    ),
    ("cross_entropy", "rocm"): Choice(
        "pallas+xla",
        "unmeasured: the loss of zaya1_8b, compiled with 4 x 4,096 tokens a GPU, moves 48 GB, not 81, and by "
        "zaya plan's model takes 105 ms, not 111, if the kernel's product is as fast as the library's",
    ),
    ("grouped_feed_forward", "rocm"): BY_DIRECTION,
    ("grouped_feed_forward of few rows", "rocm"): FEW_ROWS,
    ("grouped_matmul", "rocm"): BY_DIRECTION,
    ("grouped_swiglu", "rocm"): BY_DIRECTION,
    ("grouped_matmul of few rows", "rocm"): FEW_ROWS,
    ("grouped_swiglu of few rows", "rocm"): FEW_ROWS,
    ("residual_rms_norm", "rocm"): Choice(
        "pallas",
        "unmeasured: a step of zaya1_8b, compiled for 1,024 GPUs with 4 x 4,096 tokens each, takes 479 ms by "
        "zaya plan's model, not 496: the node's collectives are waited for less",
    ),
    ("flash_attention", "rocm"): Choice(
        "pallas",
        "unmeasured: XLA has no fused form there and keeps all scores, 3 GiB for 4 x 8 heads x 4096 squared",
    ),
}
"""Default by operation and platform. A pair without an entry is unmeasured and uses XLA's code."""
WIDEST = {"flash_attention": 256, "decode_attention": 256, "residual_rms_norm": 16_384}
"""Largest width, in channels of a head or a row, of kernels that hold a whole head or row in registers."""


def choose(
    operation: str,
    implementation: str | None,
    *,
    platform: str | None = None,
    width: int = 0,
    has_few_rows: bool = False,
) -> Any:
    """Returns the name of the implementation to trace.

    Args:
      operation: name of the public function.
      implementation: name that the caller requests; None selects the table's entry.
      platform: platform that the program is compiled for: "cpu", "cuda" or "rocm"; None is that of the first
        device here. A program compiled for another platform must name it.
      width: channels of a head or a row; beyond `WIDEST` the default is never a kernel.
      has_few_rows: whether there are so few tokens, as in decoding, that fixed costs dominate.

    Raises:
      ArgumentError: if the implementation is unknown, or its package is not installed.
    """
    if implementation is None:
        # Only the default avoids the kernel: a caller that names it gets an error with the limit instead.
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
        raise ArgumentError(f'{operation}: implementation is "{implementation}"; it must be {names} or None')
    package = PACKAGES.get(implementation)
    # No silent fallback: a caller that names a vendor's operation wants its speed.
    if package is not None and importlib.util.find_spec(package) is None:
        raise ArgumentError(
            f'{operation}: implementation is "{implementation}", which needs the package {package}, and that '
            "is not installed; install it, or use another implementation"
        )


def choice_for(operation: str, platform: str) -> Choice:
    """Returns the default for an operation on a platform: "cpu", "cuda" or "rocm" (JAX calls both "gpu")."""
    return INTERPRETED if platform == "cpu" else TABLE.get((operation, platform), UNMEASURED)


@functools.cache
def _of_platform(operation: str, platform: str) -> Choice:
    """Returns the default, and logs it once per process."""
    choice = choice_for(operation, platform)
    logging.getLogger("pallas_kernels").info(
        "%s on %s: %s (%s)", operation, platform, choice.implementation, choice.basis
    )
    return choice


def platform_of(device: Any) -> str:
    """Returns "cpu", "cuda" or "rocm" for a device, present or only described by a topology."""
    if device.platform != "gpu":
        return device.platform
    # JAX calls the GPUs of both vendors "gpu"; only these descriptions tell them apart.
    description = f"{device.client.platform_version} {device.device_kind}".lower()
    return "rocm" if "rocm" in description or "amd" in description else "cuda"

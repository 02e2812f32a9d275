"""Which implementation `implementation=None` means, by operation and platform, and what that rests on.

An entry rests on a time that was measured on the named hardware, or says that it is unmeasured. No
entry prefers a kernel because it is ours.
"""

import dataclasses
import functools
import logging
from typing import Any, Literal

import jax

Implementation = Literal["pallas", "xla"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """An implementation and the reason for it."""

    implementation: Literal["pallas", "xla", "ragged_dot"]
    basis: str


INTERPRETED = Choice("xla", "Pallas kernels are only interpreted on CPUs, for tests")
UNMEASURED = Choice("xla", "unmeasured: no time on this platform yet, so that XLA's own form is taken")
RAGGED_DOT = Choice(
    "ragged_dot", "unmeasured: the vendor's grouped product is taken until a time of the kernel beats it"
)
TABLE = {
    ("grouped_matmul", "rocm"): RAGGED_DOT,
    ("grouped_swiglu", "rocm"): RAGGED_DOT,
    ("flash_attention", "rocm"): Choice(
        "pallas",
        "unmeasured: XLA has no fused form there and keeps all scores, 3 GiB for 4 x 8 heads x 4096 squared",
    ),
}
"""By operation and platform. Where there is no entry, it is unmeasured, and XLA's form is taken."""
WIDEST = {"flash_attention": 256, "decode_attention": 256, "residual_rms_norm": 16_384}
"""Channels of a head or of a row that a kernel takes, where it holds all of them at once."""


def choose(
    operation: str, implementation: str | None, *, platform: str | None = None, width: int = 0
) -> Implementation:
    """The implementation to trace; None becomes the table's entry.

    Args:
      operation: name of the public function.
      implementation: what its caller asked for.
      platform: that the program is for: "cpu", "cuda" or "rocm". None is the one that runs here; who
        compiles for another one must name it.
      width: channels of a head or of a row. None takes no kernel for more than `WIDEST`.

    Raises:
      ValueError: if there is no such implementation.
    """
    if implementation is None:
        if width > WIDEST.get(operation, width):
            return "xla"
        choice = _of_platform(operation, platform or platform_of(jax.devices()[0])).implementation
        return "pallas" if choice == "pallas" else "xla"
    if implementation != "pallas" and implementation != "xla":
        raise ValueError(
            f'{operation}: implementation is "{implementation}"; it must be "pallas", "xla" or None'
        )
    return implementation


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

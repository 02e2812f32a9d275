"""Which implementation `implementation=None` means, by operation and platform, and what that rests on.

An entry rests on a time that was measured on the named hardware, or says that it is unmeasured. No
entry prefers a kernel because it is ours.
"""

import dataclasses
import functools
import logging
from typing import Literal

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


def choose(operation: str, implementation: str | None) -> Implementation:
    """The implementation to trace; None becomes the table's entry for the platform that runs.

    A program that is compiled here for another platform must name its implementation.

    Args:
      operation: name of the public function.
      implementation: what its caller asked for.

    Raises:
      ValueError: if there is no such implementation.
    """
    if implementation is None:
        choice = _of_platform(operation, jax.default_backend()).implementation
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
def _of_platform(operation: str, backend: str) -> Choice:
    """The choice, told once a process."""
    choice = choice_for(operation, _platform(backend))
    logging.getLogger("pallas_kernels").info(
        "%s on %s: %s (%s)", operation, _platform(backend), choice.implementation, choice.basis
    )
    return choice


def _platform(backend: str) -> str:
    if backend != "gpu":
        return backend
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"

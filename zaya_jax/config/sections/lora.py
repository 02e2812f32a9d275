"""Section `lora`: low-rank adapters."""

import dataclasses
from typing import Literal

from zaya_jax.config.rules import require, require_choices, require_positive

QUANTIZED = ("int8", "mxfp4")
"""Formats of `LoraConfig.base_dtype` that quantize the experts ([QLoRA])."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters ([LoRA]). If `rank` is set, only the adapters train and all other weights are frozen.

    Attributes:
      rank: rank of the update of each adapted matrix; 0 disables adapters.
      alpha: scale: the update of a matrix is the product of its adapter's two factors, times alpha / rank.
      targets: patterns of weight names, as `zaya train --dry-run` lists them; "*" matches any characters,
        "/" included. Each matrix of the layers that a pattern matches has an adapter. "layers/experts/*"
        selects the experts.
      rslora: whether the scale is alpha / sqrt(rank) instead, which suits high ranks ([RS-LoRA]).
      dora: whether the norms of a matrix's columns, one per output, train apart from their directions
        ([DoRA]).
      b_learning_rate_ratio: learning rate of the factors B, and of DoRA's norms, divided by that of the
        factors A ([LoRA-plus]).
      base_dtype: storage of the frozen matrices, which exist once: "float32" or "bfloat16"; "int8" or "mxfp4"
        quantizes the experts and stores other matrices in `execution.dtype` ([QLoRA]). None is
        `execution.dtype` for a new run, and what the run began with when it resumes. Norms, scales and biases
        are float32.
    """

    rank: int = 0
    alpha: float = 16.0
    # Experts are excluded by default: PEFT, the format of adapters, has no module for them.
    targets: tuple[str, ...] = ("layers/attention/*", "layers/router/*")
    rslora: bool = False
    dora: bool = False
    b_learning_rate_ratio: float = 1.0
    base_dtype: Literal["float32", "bfloat16", "int8", "mxfp4"] | None = None

    def __post_init__(self):
        require(self.rank >= 0, f"lora.rank is {self.rank}; it must be 0 (no adapters) or above")
        require_choices("lora", self)
        require_positive("lora", self, "alpha", "b_learning_rate_ratio")
        require(
            # Without targets nothing would train.
            bool(self.targets) or not self.rank,
            f"lora.targets is empty and lora.rank is {self.rank}; name at least one weight to adapt",
        )

    @property
    def scale(self) -> float:
        """Factor of the product of both factors ([LoRA] section 4.1, [RS-LoRA] eq. 1)."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

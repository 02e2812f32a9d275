"""Section `lora`: low-rank adapters."""

import dataclasses

from zaya_jax.config.rules import require, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters ([LoRA]). If `rank` is set, only the adapters train and all other weights are frozen.

    Attributes:
      rank: rank of the update of each adapted matrix; 0 disables adapters.
      alpha: scale: the update of a matrix is the product of its adapter's two factors, times alpha / rank.
      targets: patterns of weight names, as `zaya train --dry-run` lists them; "*" matches any characters,
        "/" included. Each matrix of the layers that a pattern matches has an adapter. "layers/experts/*"
        selects the experts.
    """

    rank: int = 0
    alpha: float = 16.0
    # Experts are excluded by default: PEFT, the format of adapters, has no module for them.
    targets: tuple[str, ...] = ("layers/attention/*", "layers/router/*")

    def __post_init__(self):
        require(self.rank >= 0, f"lora.rank is {self.rank}; it must be 0 (no adapters) or above")
        require_positive("lora", self, "alpha")
        require(
            # Without targets nothing would train.
            bool(self.targets) or not self.rank,
            f"lora.targets is empty and lora.rank is {self.rank}; name at least one weight to adapt",
        )

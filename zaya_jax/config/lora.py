"""The section `lora`: adapters that train in place of the weights."""

import dataclasses

from zaya_jax.config.rules import require, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters ([LoRA]). With a rank they alone train, and every weight of the network is frozen.

    Attributes:
      rank: of the change of each adapted matrix; 0 is no adapters.
      alpha: a matrix changes by the product of its adapter's two factors, times alpha / rank.
      targets: patterns of weights as a dry run lists them, where "*" is anything, "/" too. Each matrix of
        the layers that one of them matches has an adapter. Those of experts are named by
        "layers/experts/*".
    """

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ("layers/attention/*", "layers/router/*")

    def __post_init__(self):
        require(self.rank >= 0, f"lora.rank is {self.rank}; it must be 0 (no adapters) or above")
        require_positive("lora", self, "alpha")
        require(
            bool(self.targets) or not self.rank,
            f"lora.targets is empty and lora.rank is {self.rank}; it must name what has adapters",
        )

"""The section `dpo`: learning which of two answers is preferred."""

import dataclasses

from zaya_jax.config.rules import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpoConfig:
    """Direct preference optimisation ([DPO]), offline: on pairs of answers that are there, none is sampled.

    Attributes:
      beta: of the loss, how closely the run keeps to the weights that it starts from: the larger, the closer.
        0 learns the next token.
    """

    beta: float = 0.0

    def __post_init__(self):
        require(self.beta >= 0, f"dpo.beta is {self.beta}; it must be 0 (the next token is learned) or above")

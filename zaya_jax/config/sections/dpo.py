"""Section `dpo`: direct preference optimization."""

import dataclasses

from zaya_jax.config.rules import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpoConfig:
    """Direct preference optimization ([DPO]), offline: on a corpus of answer pairs, without sampling.

    Attributes:
      beta: strength of the penalty on moving away from the reference weights, which are those that the run
        starts from. 0 trains on the next-token loss instead.
    """

    beta: float = 0.0

    def __post_init__(self):
        # [DPO] requires a positive beta; 0 is the switch for the next-token loss.
        require(self.beta >= 0, f"dpo.beta is {self.beta}; it must be 0 (next-token loss) or above")

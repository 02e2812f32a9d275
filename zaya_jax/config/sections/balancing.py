"""Section `balancing`: updates of the router biases."""

import dataclasses
from typing import Literal

from zaya_jax.config.rules import (
    require,
    require_below_one,
    require_choices,
    require_not_negative,
    require_positive,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalancingConfig:
    """Controller of the router biases, which balances the load of the experts ([ZAYA1-8B] section II-A-2).

    The error of an expert is its fraction of the routed tokens minus 1/E. The paper updates the biases by
    AdamW with the error as the gradient. It does not publish the hyperparameters; the defaults here are our
    own.

    Attributes:
      rule: how a bias moves against its error: "adamw", "sign" ([DeepSeek-V3] section 2.1.2: a fixed step of
        the learning rate) or "pid" (proportional, integral, derivative).
      learning_rate: learning rate of the biases; 0 keeps them constant. With "pid" it multiplies the sum of
        the errors over all steps.
      beta1: decay rate of the mean, for "adamw".
      beta2: decay rate of the mean square, for "adamw".
      eps: value added to the root of the mean square, for "adamw".
      proportional: weight of the current error relative to the sum of all errors, in steps, for "pid".
      derivative: weight of the error's change relative to the sum of all errors, in steps, for "pid".
      skip_share: target fraction of the tokens for the skip class; the experts share the rest. None keeps the
        bias of the skip class constant, as in the released weights.
    """

    rule: Literal["adamw", "sign", "pid"] = "adamw"
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    proportional: float = 0.5
    derivative: float = 0.1
    skip_share: float | None = None

    def __post_init__(self):
        require_choices("balancing", self)
        require(
            # 0 is valid: it keeps biases constant, for example for fine-tuning.
            self.learning_rate >= 0,
            f"balancing.learning_rate is {self.learning_rate}; it must be 0 (off) or above",
        )
        # The first updates would otherwise divide by a mean square of zero.
        require_positive("balancing", self, "eps")
        # With a skip share of 1 the experts would have no tokens.
        require_below_one("balancing", self, "beta1", "beta2", "skip_share")
        require_not_negative("balancing", self, "proportional", "derivative")

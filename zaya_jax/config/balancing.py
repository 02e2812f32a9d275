"""The section `balancing`: how router biases move."""

import dataclasses
from typing import Literal

from zaya_jax.config.rules import require, require_choices, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalancingConfig:
    """The controller that keeps the experts evenly loaded ([ZAYA1-8B] section II-A-2).

    The error of an expert is its share of the tokens less 1/E. The paper's rule is AdamW with the
    error as gradient; it does not publish the values, and these are ours.

    Attributes:
      rule: what moves a bias against its error: "adamw", "sign" ([DeepSeek-V3] section 2.1.2: always by the
        learning rate) or "pid" (proportional, integral, derivative).
      learning_rate: of the biases; 0 leaves them alone. Of "pid" it scales the sum of the errors.
      beta1: of "adamw": decay of the mean.
      beta2: of "adamw": decay of the mean square.
      eps: of "adamw": added to the root of the mean square.
      proportional: of "pid": weight of the error itself beside the sum of all errors, in steps.
      derivative: of "pid": weight of the error's change beside the sum of all errors, in steps.
      skip_share: share of the tokens that the skip class is balanced to, the experts sharing the
        rest. None leaves its bias where it began, as in the released weights.
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
            self.learning_rate >= 0,
            f"balancing.learning_rate is {self.learning_rate}; it must be 0 (off) or above",
        )
        require_positive("balancing", self, "eps")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"balancing.{name} is {value}; it must be from 0 up to, not including, 1")
        for name in ("proportional", "derivative"):
            value = getattr(self, name)
            require(value >= 0, f"balancing.{name} is {value}; it must be 0 or above")
        require(
            self.skip_share is None or 0 <= self.skip_share < 1,
            f"balancing.skip_share is {self.skip_share}; it must be from 0 up to, not including, 1, or None "
            "for a bias that stays put",
        )

"""Section `dpo`: direct preference optimization, and other losses on preferences."""

import dataclasses
from typing import Literal

from zaya_jax.config.rules import require, require_choices, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpoConfig:
    """Preference optimization ([DPO] and others), offline: on a corpus of answers, without sampling.

    Attributes:
      beta: strength of the penalty on moving away from the reference weights, which are those that the run
        starts from; with "orpo" the weight of the odds ratio. 0 trains on the next-token loss instead.
      loss_type: loss by [TRL]'s name. On pairs of answers: "sigmoid" is [DPO]; "robust" is [Robust-DPO],
        which knows how often labels are wrong; "ipo" is [IPO], whose margin has a target; "orpo" is [ORPO],
        which needs no reference and also learns the chosen answers. On single answers that are marked as
        desirable or not (`zaya data preferences --unpaired`): "kto" is [KTO].
      label_smoothing: probability that the two answers of a pair are exchanged, for "sigmoid" (conservative
        DPO) and "robust".
      desirable_weight: weight of desirable answers with "kto".
      undesirable_weight: weight of the other answers with "kto".
    """

    beta: float = 0.0
    loss_type: Literal["sigmoid", "robust", "ipo", "orpo", "kto"] = "sigmoid"
    label_smoothing: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self):
        # [DPO] requires a positive beta; 0 is the switch for the next-token loss.
        require(self.beta >= 0, f"dpo.beta is {self.beta}; it must be 0 (next-token loss) or above")
        require_choices("dpo", self)
        require_positive("dpo", self, "desirable_weight", "undesirable_weight")
        require(
            # At one half, a label says nothing, and the loss of [Robust-DPO] divides by zero.
            0 <= self.label_smoothing < 0.5,
            f"dpo.label_smoothing is {self.label_smoothing}; it must be from 0 up to, not including, 0.5",
        )
        require(
            # An option without effect would be a mistake that nobody notices.
            not self.label_smoothing or self.loss_type in ("sigmoid", "robust"),
            f'dpo.label_smoothing is {self.label_smoothing} and dpo.loss_type "{self.loss_type}"; only '
            '"sigmoid" and "robust" smooth labels',
        )
        require(
            self.loss_type == "kto" or self.desirable_weight == self.undesirable_weight == 1,
            f"dpo.desirable_weight is {self.desirable_weight} and dpo.undesirable_weight "
            f'{self.undesirable_weight}; only dpo.loss_type "kto" has them, and this is "{self.loss_type}"',
        )

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares answers with their log-probabilities under the reference weights."""
        return bool(self.beta) and self.loss_type != "orpo"

    @property
    def is_unpaired(self) -> bool:
        """Whether the loss is on single answers with labels instead of pairs."""
        return bool(self.beta) and self.loss_type == "kto"

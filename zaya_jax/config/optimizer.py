"""The section `optimizer`: how weights move."""

import dataclasses
from typing import Literal

from zaya_jax.config.rules import require, require_choices, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients move weights. The split between the two is declared with each weight.

    Attributes:
      name: "muon" moves matrices by Muon and the rest by AdamW; "adamw" moves all by AdamW.
      schedule: what follows the warm-up: "constant"; "linear" or "cosine" to `final_learning_rate`
        at the last step; "warmup_stable_decay", constant and then linear over `decay_steps`.
      learning_rate: of the warm-up's last step; without a warm-up of the first step.
      final_learning_rate: of the last step; "constant" has none.
      warmup_steps: of linear growth; the first of them has one part of so many of the rate.
      decay_steps: the last steps, in which "warmup_stable_decay" decays.
      weight_decay: decoupled, times the learning rate; not on scales, biases and temperatures.
      momentum: of Muon, with Nesterov's look-ahead.
      momentum_dtype: in which Muon's momentum is kept.
      newton_schulz: polynomials of Muon's orthogonalisation: "jordan" is the first, "polar_express"
        ([Polar-Express]) comes nearer to orthogonal in as many steps.
      newton_schulz_steps: of the orthogonalisation.
      newton_schulz_dtype: of its products.
      beta1: AdamW's decay of the mean.
      beta2: AdamW's decay of the mean square.
      eps: AdamW's, added to the root of the mean square.
      clip_norm: the global gradient norm, of all that trains, is scaled down to this.
      frozen: patterns of weights that do not train, as a dry run lists them, where "*" is anything, "/" too:
        "embedding/*", "layers/router/*".
    """

    name: Literal["muon", "adamw"] = "muon"
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "cosine"
    learning_rate: float = 6e-4
    final_learning_rate: float = 2e-4
    warmup_steps: int = 100
    decay_steps: int = 0
    weight_decay: float = 0.1
    momentum: float = 0.95
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    newton_schulz: Literal["jordan", "polar_express"] = "jordan"
    newton_schulz_steps: int = 5
    newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0
    frozen: tuple[str, ...] = ()

    def __post_init__(self):
        require_choices("optimizer", self)
        require_positive("optimizer", self, "learning_rate", "newton_schulz_steps", "eps", "clip_norm")
        for name in ("final_learning_rate", "warmup_steps", "weight_decay"):
            require(
                getattr(self, name) >= 0, f"optimizer.{name} is {getattr(self, name)}; it must be 0 or above"
            )
        for name in ("momentum", "beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optimizer.{name} is {value}; it must be from 0 up to, not including, 1")
        require(
            (self.decay_steps > 0) == (self.schedule == "warmup_stable_decay"),
            f'optimizer.decay_steps is {self.decay_steps} and optimizer.schedule "{self.schedule}"; '
            'decay_steps must be above 0 with "warmup_stable_decay", and 0 with the others',
        )

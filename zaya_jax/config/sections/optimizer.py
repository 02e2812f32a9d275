"""Section `optimizer`: Muon, AdamW and the learning-rate schedule."""

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
class OptimizerConfig:
    """Muon, AdamW and the learning-rate schedule. Which weights Muon updates is declared with each weight.

    `normuon`, `hyperball` and `cautious_decay` can be combined. They are off by default.

    Attributes:
      name: "muon" updates matrices by Muon and the rest by AdamW; "adamw" updates everything by AdamW.
      schedule: learning rate after the warm-up: "constant"; "linear" or "cosine" decay to
        `final_learning_rate` at the last step; "warmup_stable_decay", constant and then linear decay over
        `decay_steps`.
      learning_rate: learning rate of the last warm-up step, or of the first step without a warm-up.
      final_learning_rate: learning rate of the last step; not used by "constant".
      warmup_steps: number of steps of linear warm-up; the first step has learning_rate / warmup_steps.
      warmup_fraction: warm-up as a fraction of the steps of the run, from which the run derives
        `warmup_steps` when it starts; None leaves `warmup_steps` as it is.
      decay_steps: number of final steps in which "warmup_stable_decay" decays.
      weight_decay: decoupled weight decay, multiplied by the learning rate; not applied to scales, biases and
        temperatures.
      matrix_rate: factor of the learning rate of matrices. With `hyperball` their rate is relative to the
        norm of the weights, so that it differs from AdamW's rate of the other weights.
      normuon: divides Muon's update by the root mean square of each output neuron ([NorMuon]), averaged over
        steps with `beta2`, and scales it to the norm of Muon's update.
      hyperball: moves each matrix of Muon by `learning_rate * matrix_rate` times its Frobenius norm, and
        scales it back to that norm, which is that of its initial value ([Hyperball]). These matrices have no
        weight decay. A matrix of zeros does not move.
      cautious_decay: decays only elements that the update moves towards zero, where update times weight is at
        least 0 ([CWD]), for Muon and AdamW both.
      momentum: Muon's Nesterov momentum.
      momentum_dtype: storage type of Muon's momentum.
      newton_schulz: polynomials of Muon's orthogonalization: "jordan" is the original; "polar_express"
        ([Polar-Express]) is closer to orthogonal after the same number of steps.
      newton_schulz_steps: number of steps of the orthogonalization.
      newton_schulz_dtype: type of its matrix products.
      beta1: AdamW's decay rate of the mean.
      beta2: decay rate of the mean square of AdamW and NorMuon.
      eps: value that AdamW and NorMuon add to the root of the mean square.
      clip_norm: maximum global gradient norm over all trainable weights; larger gradients are scaled down.
      frozen: patterns of names of weights that do not train, as `zaya train --dry-run` lists them: "*"
        matches any characters, "/" included, as in "embedding/*" or "layers/router/*".
    """

    name: Literal["muon", "adamw"] = "muon"
    # "warmup_stable_decay" allows extending a run, because the learning rate of finished steps does not
    # depend on the number of steps.
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "cosine"
    learning_rate: float = 6e-4
    final_learning_rate: float = 2e-4
    warmup_steps: int = 100
    warmup_fraction: float | None = None
    decay_steps: int = 0
    weight_decay: float = 0.1
    matrix_rate: float = 1.0
    normuon: bool = False
    hyperball: bool = False
    cautious_decay: bool = False
    momentum: float = 0.95
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    newton_schulz: Literal["jordan", "polar_express"] = "jordan"
    newton_schulz_steps: int = 5
    # float32 by default; bfloat16 is faster and was stable in [Muon].
    newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0
    frozen: tuple[str, ...] = ()

    def __post_init__(self):
        require_choices("optimizer", self)
        require_positive(
            "optimizer", self, "learning_rate", "matrix_rate", "newton_schulz_steps", "eps", "clip_norm"
        )
        require_not_negative("optimizer", self, "final_learning_rate", "warmup_steps", "weight_decay")
        require_below_one("optimizer", self, "momentum", "beta1", "beta2", "warmup_fraction")
        require(
            # A decay that no schedule uses would be ignored silently.
            (self.decay_steps > 0) == (self.schedule == "warmup_stable_decay"),
            f'optimizer.decay_steps is {self.decay_steps} and optimizer.schedule "{self.schedule}"; '
            'decay_steps must be above 0 with "warmup_stable_decay", and 0 with the others',
        )
        for switch in self.muon_switches:
            require(
                self.name == "muon",
                f'optimizer.{switch} is True and optimizer.name "{self.name}"; it changes the update of '
                'Muon, so set optimizer.name to "muon"',
            )

    @property
    def muon_switches(self) -> tuple[str, ...]:
        """Names of the fields that change Muon's update and are set."""
        return tuple(name for name in ("normuon", "hyperball") if getattr(self, name))

    @property
    def matrix_optimizer(self) -> str:
        """Name of the optimizer of matrices in the literature, such as "MuonH" for Muon with hyperball."""
        if self.name == "adamw":
            return "AdamW"
        return ("NorMuon" if self.normuon else "Muon") + ("H" if self.hyperball else "")

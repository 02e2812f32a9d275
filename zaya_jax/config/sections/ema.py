"""Section `ema`: exponential moving average of the weights."""

import dataclasses

from zaya_jax.config.rules import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """Exponential moving average (EMA) of the weights that train and of the router biases.

    It changes nothing that the run learns. Each evaluation evaluates it next to the weights, and each
    checkpoint contains it; `--weights=ema` selects it in `zaya generate`, `eval`, `convert` and others.

    Attributes:
      decay: weight of the previous average in each step, such as 0.999; the new weights have 1 - decay. 0
        disables the average. If a resume enables it, it starts from the weights of the checkpoint; if a
        resume disables it, later checkpoints have none.
      decay_warmup: whether the n-th update has at most the decay (1 + n) / (10 + n), so that the average of
        a short run does not consist of its first weights.
    """

    decay: float = 0.0
    decay_warmup: bool = True

    def __post_init__(self):
        # With a decay of 1 the average would never change.
        require(
            0 <= self.decay < 1,
            f"ema.decay is {self.decay}; it must be 0 (no average), or above 0 and below 1",
        )

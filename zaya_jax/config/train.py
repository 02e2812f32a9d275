"""The section `train`: the run around the step."""

import dataclasses
from typing import Literal

from zaya_jax.config.rules import require, require_choices, require_positive, require_seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The run around the step.

    Attributes:
      num_steps: optimiser steps; of a run with phases, those of all phases together.
      z_loss: weight of the squared log of the softmax's denominator, which keeps logits from
        drifting ([PaLM] section 5); 0 is off.
      update_norms: whether metrics have the norms of the weights' updates, by group; they cost a step two
        passes over all updates.
      seed: of the initial weights and of everything random later.
      log_every: steps between two lines of metrics.
      eval_every: steps between two held-out losses; there is always one at the end.
      eval_sequences: held-out sequences that are scored; None scores all.
      checkpoint_every: steps between two checkpoints; there is always one at the end.
      checkpoint_minutes: minutes from the begin of one save to the next one, where `checkpoint_every` does
        not come first; None is off.
      keep_checkpoints: how many of the newest checkpoints stay.
      keep_every: a checkpoint whose step is a multiple of this stays for ever; None is off. The ends of
        phases stay too.
      keep_best: whether the checkpoint with the lowest held-out loss stays.
      min_free_gib: GiB of the disk that a save must leave free. It removes older checkpoints for that which
        `keep_checkpoints` alone keeps; None is off.
      on_failed_save: "stop" ends the run at a checkpoint that cannot be written; "go_on" says so and tries
        again at the next one, but the run's last must be written.
      sample_tokens: length of the sample at the end of the run; 0 for none.
      stop_after_skips: steps in a row that were skipped, for want of a finite loss and gradient, that end
        the run; it is seen at the next line of metrics or checkpoint.
      init_from: a run folder whose newest weights this run starts from; None starts from random ones.
    """

    num_steps: int = 1000
    z_loss: float = 0.0
    update_norms: bool = True
    seed: int = 0
    log_every: int = 10
    eval_every: int = 500
    eval_sequences: int | None = None
    checkpoint_every: int = 500
    checkpoint_minutes: float | None = None
    keep_checkpoints: int = 2
    keep_every: int | None = None
    keep_best: bool = False
    min_free_gib: float | None = None
    on_failed_save: Literal["stop", "go_on"] = "stop"
    sample_tokens: int = 256
    stop_after_skips: int = 10
    init_from: str | None = None

    def __post_init__(self):
        require(self.z_loss >= 0, f"train.z_loss is {self.z_loss}; it must be 0 (off) or above")
        require_positive("train", self, "num_steps", "log_every", "eval_every", "checkpoint_every")
        require_positive("train", self, "keep_checkpoints", "stop_after_skips")
        require_choices("train", self)
        require_seed("train", self.seed)
        require(
            self.sample_tokens >= 0, f"train.sample_tokens is {self.sample_tokens}; it must be 0 or above"
        )
        require(
            self.eval_sequences is None or self.eval_sequences > 0,
            f"train.eval_sequences is {self.eval_sequences}; it must be above 0, or None for all",
        )
        for name in ("checkpoint_minutes", "keep_every", "min_free_gib"):
            value = getattr(self, name)
            require(
                value is None or value > 0, f"train.{name} is {value}; it must be above 0, or None for off"
            )
        require(
            (self.keep_every or 0) % self.checkpoint_every == 0,
            f"train.keep_every is {self.keep_every} and train.checkpoint_every {self.checkpoint_every}; it "
            "must be a multiple of that: only a step that is saved can stay",
        )

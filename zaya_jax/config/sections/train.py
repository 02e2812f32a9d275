"""Section `train`: length of a run, logging, evaluation and checkpoints."""

import dataclasses
from typing import Literal

from zaya_jax.config.files import require_local
from zaya_jax.config.rules import (
    require,
    require_choices,
    require_not_negative,
    require_positive,
    require_seed,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of a run, logging, evaluation and checkpoints.

    Attributes:
      num_steps: number of optimizer steps; the sum over all phases if there are phases.
      epochs: passes over the training split of `data.corpus`. The run derives `num_steps` from it when it
        starts, rounded up; None leaves `num_steps` as it is.
      evaluations: evaluations over the run, at equal intervals and each with a checkpoint. The run derives
        `eval_every` and `checkpoint_every` from it; None leaves them as they are.
      z_loss: weight of the squared log of the softmax's denominator, which keeps logits from drifting
        ([PaLM] section 5); 0 disables it.
      update_norms: whether metrics include norms of the weight updates by group. They cost a step two passes
        over all updates.
      seed: seed of the initial weights and of all other random numbers.
      log_every: steps between two rows of metrics.
      eval_every: steps between two evaluations of the held-out loss; there is always one at the end.
      eval_sequences: number of held-out sequences to evaluate; None for all.
      checkpoint_every: steps between two checkpoints; there is always one at the end.
      checkpoint_minutes: maximum minutes between the starts of two saves, in addition to `checkpoint_every`;
        None disables it.
      checkpoint_writers: about how many processes write a checkpoint in runs with more: groups of processes
        gather their shards, and one of each group writes them. It bounds the number of files, and the work of
        process 0 for a checkpoint. Fewer processes all write.
      peer_copies_every: steps between two copies of the state in memory: each process keeps the shards of its
        devices in the memory of its node and in that of the next node, so that a restart after the loss of
        one node reads nothing from the storage. `zaya plan` shows their size. None disables them.
      peer_copies_folder: folder of these copies on each node, which must outlive the processes; "{host}" in
        it stands for the name of the host. None for a folder of this user in /dev/shm.
      keep_checkpoints: number of latest checkpoints to keep.
      keep_every: checkpoints of steps that are multiples of this, and of the ends of phases, are kept
        forever; None disables it.
      keep_best: whether to keep the checkpoint with the lowest held-out loss.
      min_free_gib: disk space in GiB that must stay free after a save. To reach it, older checkpoints that
        are kept only because of `keep_checkpoints` are removed; None disables it.
      on_failed_save: "stop" ends the run if a checkpoint cannot be written; "continue" logs the error and
        tries again at the next checkpoint, but ends the run if the last one cannot be written.
      sample_tokens: number of tokens of the text sample at the end of the run; 0 disables it.
      max_consecutive_skips: number of consecutive skipped steps (loss or gradient not finite) that ends the
        run, checked whenever metrics or a checkpoint are written.
      init_from: run folder whose latest weights this run starts from; None starts from random weights.
    """

    num_steps: int = 1000
    epochs: float | None = None
    evaluations: int | None = None
    z_loss: float = 0.0
    update_norms: bool = True
    seed: int = 0
    log_every: int = 10
    eval_every: int = 500
    eval_sequences: int | None = None
    checkpoint_every: int = 500
    # Steps limit the lost work in tokens, minutes limit it in time if steps become slow.
    checkpoint_minutes: float | None = None
    # The index of each process that writes costs process 0 about a millisecond per checkpoint.
    checkpoint_writers: int = 256
    peer_copies_every: int | None = None
    peer_copies_folder: str | None = None
    keep_checkpoints: int = 2
    keep_every: int | None = None
    keep_best: bool = False
    min_free_gib: float | None = None
    on_failed_save: Literal["stop", "continue"] = "stop"
    sample_tokens: int = 256
    max_consecutive_skips: int = 10
    init_from: str | None = None

    def __post_init__(self):
        require_not_negative("train", self, "z_loss", "sample_tokens")
        require_positive("train", self, "num_steps", "log_every", "eval_every", "checkpoint_every")
        require_positive("train", self, "keep_checkpoints", "max_consecutive_skips", "eval_sequences")
        require_positive("train", self, "checkpoint_minutes", "keep_every", "min_free_gib")
        require_positive("train", self, "peer_copies_every")
        require_positive("train", self, "epochs", "evaluations")
        require(
            # A multiple of an interval that the run has yet to derive.
            self.evaluations is None or self.keep_every is None,
            f"train.evaluations is {self.evaluations} and train.keep_every {self.keep_every}; set one to "
            "None",
        )
        require(
            self.checkpoint_writers > 1,
            f"train.checkpoint_writers is {self.checkpoint_writers}; it must be 2 or above, because "
            "Orbax writes no array that one of several processes has whole",
        )
        require_choices("train", self)
        require_seed("train", self.seed)
        require_local("train.init_from", self.init_from)
        require_local("train.peer_copies_folder", self.peer_copies_folder)
        require(
            # keep_every does not trigger saves; it only selects among the steps that are saved.
            (self.keep_every or 0) % self.checkpoint_every == 0,
            f"train.keep_every is {self.keep_every} and train.checkpoint_every {self.checkpoint_every}; it "
            "must be a multiple of the latter, because only steps that are saved can be kept",
        )

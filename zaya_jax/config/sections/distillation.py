"""Section `distillation`: learning from the predictions of another run."""

import dataclasses

from zaya_jax.config.files import require_local
from zaya_jax.config.rules import require, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Knowledge distillation ([Distillation]): the run learns the predictions of a teacher on its own corpus.

    The `top_k` largest logits of the teacher at each token are computed once, before the first step, and
    stored in the run folder. The loss of a token is
    `weight * temperature² * KL(teacher || student) + (1 - weight) * cross-entropy of the next token`.

    Attributes:
      teacher: run folder whose latest weights are the teacher; None disables distillation. The teacher may
        have another architecture, but needs the same tokenizer and `model.vocab_size`.
      top_k: number of logits that are stored per token. The teacher's distribution is the softmax over these
        tokens; the student's is that over all tokens. A token takes 4 bytes per logit and 2 more for its
        number, or 4 with more than 65,536 tokens.
      temperature: divisor of the logits of both; above 1, unlikely tokens count more.
      weight: weight of the teacher's predictions, from 0 to 1; the rest is that of the text's next tokens.
    """

    teacher: str | None = None
    top_k: int = 64
    temperature: float = 1.0
    weight: float = 1.0

    def __post_init__(self):
        require_positive("distillation", self, "top_k", "temperature")
        require_local("distillation.teacher", self.teacher)
        require(
            # With a weight of 0 the teacher would be read and stored for nothing.
            0 < self.weight <= 1,
            f"distillation.weight is {self.weight}; it must be above 0 and at most 1",
        )

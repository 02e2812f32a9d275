"""Section `data`: corpora, tokenizer, and batches."""

import dataclasses
from typing import Literal

from zaya_jax.config.files import require_local
from zaya_jax.config.rules import (
    require,
    require_choices,
    require_different,
    require_name,
    require_positive,
    require_seed,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Several corpora that are interleaved by weight.

    Attributes:
      name: name of the mixture, for `DataConfig.mixture`.
      corpora: folders of token shards. They must exist and have the same tokenizer.
      weights: relative weight of each corpus in tokens, normalized to a sum of 1.
    """

    name: str
    corpora: tuple[str, ...]
    weights: tuple[float, ...]

    def __post_init__(self):
        require_name("data.mixtures", self.name)
        for corpus in self.corpora:
            require_local(f"data.mixtures.{self.name}.corpora", corpus)
        require(
            # Zipping would silently drop the rest of the longer list.
            0 < len(self.corpora) == len(self.weights),
            f"data.mixtures.{self.name} has {len(self.corpora)} corpora and {len(self.weights)} weights; it "
            "must have one weight for each corpus, and at least one corpus",
        )
        require(
            # Each corpus is read in its own order, so listing it twice would repeat the same tokens.
            len(set(self.corpora)) == len(self.corpora),
            f"data.mixtures.{self.name} lists a corpus twice; list it once, with the sum of its weights",
        )
        for corpus, weight in zip(self.corpora, self.weights, strict=True):
            require(
                # A weight of 0 would open and fingerprint a corpus that is never read.
                weight > 0,
                f"data.mixtures.{self.name} has weight {weight} for {corpus}; it must be above 0",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Corpora, tokenizer, and the shape and order of batches.

    Attributes:
      corpus: folder of token shards to train on, unless `mixture` is set. Its validation split is used for
        the held-out loss in either case. A missing corpus is built from `source`.
      source: text that a missing `corpus` is built from: "stdlib" for Python's standard library, or a file or
        folder that `zaya data build` accepts. None if the corpus must already exist. Setting `corpus` on the
        command line resets this to None unless `source` is set as well.
      source_kind: what `source` holds: "text", or records of "chats", "preferences" (pairs of answers) or
        "answers" (single answers with labels), which are packed into windows of `sequence_length` with the
        tokenizer's chat template, as `zaya data chats` and `zaya data preferences` do by default.
      mixtures: mixtures that `mixture` can select.
      mixture: name of the mixture to train on; None trains on `corpus`.
      tokenizer: "byte", "byte-chat" (bytes and tokens that delimit chat turns), "byte-tools" (also tokens
        that delimit tool calls), or the path of a Hugging Face tokenizer.json.
      tokenizer_vocab_size: number of tokens of a tokenizer.json that is trained on the training split of
        `source` if the file is missing; None if it must already exist.
      bos_token: token that starts each document. None takes it from the tokenizer's files or from well-known
        names; if there is none, EOS is used.
      eos_token: token that ends each document. None looks it up in the same way; it must exist.
      pad_token: token that fills up blocks. None looks it up in the same way; if there is none, EOS is used.
      sequence_length: T, tokens per sequence. A corpus of chats is readable only at the length that it was
        packed for.
      batch_size: B, sequences per optimizer step over all devices, after the ramp if there is one.
      batch_ramp: smaller batches at the start of the run: pairs (number of steps, tokens per step),
        increasing up to the tokens of `batch_size`.
      seed: seed of the order of the training sequences.
    """

    corpus: str = "corpora/stdlib"
    source: str | None = None
    source_kind: Literal["text", "chats", "preferences", "answers"] = "text"
    mixtures: tuple[MixtureConfig, ...] = ()
    mixture: str | None = None
    tokenizer: str = "byte"
    tokenizer_vocab_size: int | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    sequence_length: int = 4096
    batch_size: int = 4096
    batch_ramp: tuple[tuple[int, int], ...] = ()
    seed: int = 0

    def __post_init__(self):
        require_positive("data", self, "batch_size", "tokenizer_vocab_size")
        require_seed("data", self.seed)
        require_choices("data", self)
        require(
            # Targets are the tokens shifted by one, so a sequence of one token has none.
            self.sequence_length > 1,
            f"data.sequence_length is {self.sequence_length}; it must be at least 2: a token and its target",
        )
        # These values are paths, but may also be names such as "stdlib" and "byte".
        for name in ("corpus", "source", "tokenizer"):
            require_local(f"data.{name}", getattr(self, name))
        require(self.corpus != "", "data.corpus is empty; it must be the folder of the token shards")
        names = [mixture.name for mixture in self.mixtures]
        require_different("data.mixtures", names)
        require(
            self.mixture is None or self.mixture in names,
            f'data.mixture is "{self.mixture}"; it must be a name in data.mixtures, which has '
            f"{', '.join(names) or 'none'}, or None for data.corpus",
        )
        self._check_ramp()

    def _check_ramp(self) -> None:
        before = 0
        for steps, tokens in self.batch_ramp:
            require(
                steps > 0,
                f"data.batch_ramp has {steps} steps of {tokens} tokens; its pairs are (steps, tokens of "
                "each), with at least 1 step",
            )
            require(
                # Sizes are tokens, so that a ramp means the same for all sequence lengths, but a batch has
                # whole sequences.
                tokens > 0 and tokens % self.sequence_length == 0,
                f"data.batch_ramp has steps of {tokens} tokens; they must be whole sequences, a multiple of "
                f"data.sequence_length, {self.sequence_length}",
            )
            require(
                # A ramp that shrinks, or exceeds the full batch, is most likely a typo.
                before < tokens < self.batch_tokens,
                f"data.batch_ramp has steps of {tokens} tokens after {before}; it must grow, and stay below "
                f"data.batch_size x data.sequence_length, {self.batch_tokens}",
            )
            before = tokens

    @property
    def batch_tokens(self) -> int:
        """Tokens per step after the ramp."""
        return self.batch_size * self.sequence_length

    @property
    def ramp_steps(self) -> int:
        """Number of steps until the batch has its full size."""
        return sum(steps for steps, _ in self.batch_ramp)

    def steps_for(self, tokens: int) -> int:
        """The smallest number of steps that read this many tokens.

        Raises:
          UserError: if the ramp alone reads that many.
        """
        left = tokens - sum(steps * size for steps, size in self.batch_ramp)
        require(
            left > 0,
            f"data.batch_ramp reads {tokens - left} tokens; it must read fewer than the phase, {tokens}",
        )
        # The division rounds up: a phase reads at least its tokens.
        return self.ramp_steps + -(-left // self.batch_tokens)

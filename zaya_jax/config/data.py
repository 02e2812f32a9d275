"""The section `data`: the tokens."""

import dataclasses

from zaya_jax.config.rules import require, require_different, require_name, require_positive, require_seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Several corpora read as one.

    Attributes:
      name: what `DataConfig.mixture` calls it.
      corpora: folders of token shards, which must be there, of one tokenizer.
      weights: of each corpus, in shares of the tokens; their sum may be anything.
    """

    name: str
    corpora: tuple[str, ...]
    weights: tuple[float, ...]

    def __post_init__(self):
        require_name("data.mixtures", self.name)
        require(
            0 < len(self.corpora) == len(self.weights),
            f"data.mixtures.{self.name} has {len(self.corpora)} corpora and {len(self.weights)} weights; it "
            "must have one weight for each corpus, and at least one corpus",
        )
        require(
            len(set(self.corpora)) == len(self.corpora),
            f"data.mixtures.{self.name} names a corpus twice; each must be there once, with its whole weight",
        )
        for corpus, weight in zip(self.corpora, self.weights, strict=True):
            require(
                weight > 0,
                f"data.mixtures.{self.name} gives {corpus} the weight {weight}; it must be above 0",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from and how they are cut.

    Attributes:
      corpus: folder of token shards: what is trained on, unless a mixture is named, and whose
        held-out split is scored in any case. One that is missing is built from `source`.
      source: what `corpus` is built from: "stdlib" for Python's own standard library, a file or a folder
        with text, as `zaya data build` takes it, or None when the corpus must already be there. An option
        that names another corpus than the config file does makes it None, unless another names its source.
      mixtures: what `mixture` can name.
      mixture: name of the mixture that is trained on; None trains on `corpus`.
      tokenizer: "byte", "byte-chat" (which has borders of chats), or the path of a Hugging Face
        tokenizer.json.
      tokenizer_vocab_size: tokens of a tokenizer.json that is to be trained on the training split of `source`
        where it is missing; None when it must already be there.
      bos_token: name of the token that begins documents; None takes what the tokenizer's own files say of
        it, else a well-known name. Without one EOS begins them too.
      eos_token: name of the token that ends documents; None finds it likewise, and there must be one.
      pad_token: name of the token that fills up blocks; None finds it likewise. Without one EOS does.
      sequence_length: T, tokens a sequence. A corpus of chats is read at the length of its windows alone.
      batch_size: B, sequences an optimiser step, over all devices; behind the ramp if there is one.
      batch_ramp: smaller batches to begin with: pairs of a number of steps and the tokens of each,
        growing up to those of `batch_size`.
      seed: of the order of the training sequences.
    """

    corpus: str = "corpora/stdlib"
    source: str | None = None
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
        require_positive("data", self, "batch_size")
        require_seed("data", self.seed)
        require(
            self.sequence_length > 1,
            f"data.sequence_length is {self.sequence_length}; it must be at least 2: a token and its target",
        )
        size = self.tokenizer_vocab_size
        require(
            size is None or size > 0,
            f"data.tokenizer_vocab_size is {size}; it must be above 0, or None to train no tokenizer",
        )
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
                tokens > 0 and tokens % self.sequence_length == 0,
                f"data.batch_ramp has steps of {tokens} tokens; they must be whole sequences, a multiple of "
                f"data.sequence_length, {self.sequence_length}",
            )
            require(
                before < tokens < self.batch_tokens,
                f"data.batch_ramp has steps of {tokens} tokens after {before}; it must grow, and stay below "
                f"data.batch_size x data.sequence_length, {self.batch_tokens}",
            )
            before = tokens

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step behind the ramp."""
        return self.batch_size * self.sequence_length

    @property
    def ramp_steps(self) -> int:
        """Steps before the batch has its full size."""
        return sum(steps for steps, _ in self.batch_ramp)

    def steps_for(self, tokens: int) -> int:
        """The fewest steps that read so many tokens.

        Raises:
          ValueError: when the ramp alone reads as many.
        """
        left = tokens - sum(steps * size for steps, size in self.batch_ramp)
        require(
            left > 0,
            f"data.batch_ramp reads {tokens - left} tokens; it must read fewer than the phase, {tokens}",
        )
        return self.ramp_steps + -(-left // self.batch_tokens)

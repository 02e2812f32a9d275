"""What a run is: frozen, checked dataclasses built from an `ml_collections.ConfigDict`.

Every rule about a value is here, with a sentence for whoever breaks it. Field names are those of
Hugging Face's `ZayaConfig` where the concept is the same. Nothing here imports jax.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal

from ml_collections import ConfigDict

from zaya_jax.fields import build, convert, describe_types, flatten, to_plain

CONFIG_FILE = "config.json"
"""What the resolved config of a run is called in its folder."""

HYBRID = "hybrid"
HYBRID_SLIDING = "hybrid_sliding"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_positive(section: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value > 0, f"{section}.{name} is {value}; it must be above 0")


def _require_seed(section: str, seed: int) -> None:
    # What grain's shuffle takes; jax.random.key would take more and drop the upper bits.
    _require(0 <= seed < 2**32, f"{section}.seed is {seed}; it must be from 0 to 2**32 - 1")


def _require_name(section: str, name: str) -> None:
    _require(
        re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) is not None,
        f'{section} has the name "{name}"; a name must be letters, digits, - and _, and begin with a letter',
    )


def _require_different(section: str, names: list[str]) -> None:
    for name in names:
        _require(names.count(name) == 1, f'{section} has "{name}" twice; each name must be another')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network. Defaults are ZAYA1-8B's ([8B] Table I).

    Attributes:
      vocab_size: V, rows of the tied embedding.
      hidden_size: D, width of the residual stream.
      num_hidden_layers: L, layers of one attention and one mixture-of-experts block each.
      num_attention_heads: N, query heads.
      num_key_value_heads: K, key and value heads; even, or the head width is: half of the value
        channels come from the previous token.
      head_dim: H, width of a head.
      cca_time0: taps of the depthwise convolution over time.
      cca_time1: taps of the per-head convolution over time.
      layer_pattern: kinds of layers, repeated over the depth: "hybrid" attends to all earlier
        tokens, "hybrid_sliding" to the last `sliding_window`.
      sliding_window: tokens a sliding layer attends to, the current one included.
      rope_theta: base of the rotary embedding of "hybrid" layers.
      sliding_rope_theta: the same for "hybrid_sliding" layers.
      partial_rotary_factor: share of each head that is rotated.
      moe_intermediate_size: F, width of an expert.
      num_experts: E, experts a layer, without the skip class.
      router: "mlp" is ZAYA1's; "linear" is the plain router it is compared with.
      router_hidden_size: R, width of the router's state.
      skip_class: what a token gets that chooses the skip class: "zero" (Hugging Face) or
        "identity", the router's probability times the block's normalised input (ZAYA1-base).
      rms_norm_eps: added to the mean square in every RMSNorm.
      initializer_range: standard deviation of the initial weights.
      lm_head_bias: adds a bias to the tied head.
      max_position_embeddings: the longest sequence that the model is meant for.
      dtype: type of activations and matrix products; parameters and the stream are float32.
      remat: what the backward pass recomputes. "none": nothing. "products": all but plain matrix
        products, attention and experts, whose results are kept. "attention_and_experts": keeps of
        each layer the results of attention and of the experts' products alone. "block": keeps the
        stream before each attention and each block of experts. "layer": keeps the stream before each
        layer. "group": keeps the stream before each group of about sqrt(num_hidden_layers) layers, and
        computes each layer twice more: for the streams within the group, and for its own backward pass.
        Each keeps less than the one before and computes more.
      implementation: of every operation of the run that has a kernel and is not named in a field of
        its own, loss and optimiser among them: "pallas" is the kernel, "xla" what XLA makes of plain
        operations. None takes what `pallas_kernels/choice.py` says is best on the platform.
      attention_implementation: in training. Two forms of "xla" can be named: "full" makes all scores of
        a layer at once, "blockwise" those of a pair of blocks at a time; it takes the latter for
        sequences of 1,024 tokens or more. This and the fields below: None is as `implementation` says.
      decode_implementation: of a new token's attention to the cache.
      experts_implementation: two forms of "xla" can be named: "blocked", which it takes on CPUs, and
        "ragged_dot".
      residual_implementation: of the step from attention to experts, where the stream is merged and
        normed; the kernel does both in one pass.
      cca_implementation: of the step from latents to queries and keys, with both convolutions; the kernel
        does all of it in one pass.
    """

    vocab_size: int = 262_272
    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 128
    cca_time0: int = 2
    cca_time1: int = 2
    layer_pattern: tuple[str, ...] = (HYBRID,)
    sliding_window: int | None = None
    rope_theta: float = 5_000_000.0
    sliding_rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.5
    moe_intermediate_size: int = 2048
    num_experts: int = 16
    router: Literal["mlp", "linear"] = "mlp"
    router_hidden_size: int = 256
    skip_class: Literal["zero", "identity"] = "zero"
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    lm_head_bias: bool = False
    max_position_embeddings: int = 131_072
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    remat: Literal["none", "products", "attention_and_experts", "block", "layer", "group"] = "none"
    implementation: Literal["xla", "pallas"] | None = None
    attention_implementation: Literal["full", "blockwise", "xla", "pallas"] | None = None
    decode_implementation: Literal["xla", "pallas"] | None = None
    experts_implementation: Literal["blocked", "ragged_dot", "xla", "pallas"] | None = None
    residual_implementation: Literal["xla", "pallas"] | None = None
    cca_implementation: Literal["xla", "pallas"] | None = None

    def __post_init__(self):
        _check_choices("model", self)
        _require_positive(
            "model", self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "cca_time0", "cca_time1", "rope_theta", "sliding_rope_theta",
            "moe_intermediate_size", "num_experts", "router_hidden_size", "initializer_range",
            "max_position_embeddings",
        )  # fmt: skip
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"model.num_attention_heads is {self.num_attention_heads}; it must be a multiple of "
            f"model.num_key_value_heads, {self.num_key_value_heads}",
        )
        _require(
            self.num_key_value_heads * self.head_dim % 2 == 0,
            f"model.num_key_value_heads x model.head_dim is {self.num_key_value_heads} x {self.head_dim}; it "
            "must be even, because half of the value channels come from the previous token",
        )
        rotary = self.head_dim * self.partial_rotary_factor
        _require(
            0 < self.partial_rotary_factor <= 1 and rotary == int(rotary) and rotary % 2 == 0,
            f"model.partial_rotary_factor is {self.partial_rotary_factor}; with model.head_dim "
            f"{self.head_dim} it must rotate an even number of channels, from 2 to {self.head_dim}",
        )
        self._check_pattern()

    def _check_pattern(self) -> None:
        _require(len(self.layer_pattern) > 0, f'model.layer_pattern is empty; ("{HYBRID}",) is the plain one')
        for kind in self.layer_pattern:
            _require(
                kind in (HYBRID, HYBRID_SLIDING),
                f'model.layer_pattern has "{kind}"; its entries must be "{HYBRID}" or "{HYBRID_SLIDING}"',
            )
        if HYBRID_SLIDING in self.layer_pattern:
            _require(
                self.sliding_window is not None and self.sliding_window > 0,
                f'model.sliding_window is {self.sliding_window}; with "{HYBRID_SLIDING}" layers it must be '
                "the number of tokens they attend to, the current one included",
            )

    @classmethod
    def from_dict(cls, values: dict) -> "ModelConfig":
        """Builds and checks a network's config from plain values, as `Config.from_dict` does."""
        return build(cls, values, "model")

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The kind of each layer, [L]."""
        period = len(self.layer_pattern)
        return tuple(self.layer_pattern[i % period] for i in range(self.num_hidden_layers))

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def num_router_classes(self) -> int:
        """Experts and the skip class."""
        return self.num_experts + 1

    @property
    def conv_tail(self) -> int:
        """Earlier tokens that both convolutions together look back on."""
        return self.cca_time0 + self.cca_time1 - 2


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
        _require_name("data.mixtures", self.name)
        _require(
            0 < len(self.corpora) == len(self.weights),
            f"data.mixtures.{self.name} has {len(self.corpora)} corpora and {len(self.weights)} weights; it "
            "must have one weight for each corpus, and at least one corpus",
        )
        _require(
            len(set(self.corpora)) == len(self.corpora),
            f"data.mixtures.{self.name} names a corpus twice; each must be there once, with its whole weight",
        )
        for corpus, weight in zip(self.corpora, self.weights, strict=True):
            _require(
                weight > 0,
                f"data.mixtures.{self.name} gives {corpus} the weight {weight}; it must be above 0",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from and how they are cut.

    Attributes:
      corpus: folder of token shards: what is trained on, unless a mixture is named, and whose
        held-out split is scored in any case. One that is missing is built from `source`.
      source: "stdlib" for Python's own standard library, a folder of text files, or None when the
        corpus must already be there.
      mixtures: what `mixture` can name.
      mixture: name of the mixture that is trained on; None trains on `corpus`.
      tokenizer: "byte", or the path of a Hugging Face tokenizer.json.
      sequence_length: T, tokens a sequence.
      batch_size: B, sequences an optimiser step, over all devices; behind the ramp if there is one.
      batch_ramp: smaller batches to begin with: pairs of a number of steps and the tokens of each,
        growing up to those of `batch_size`.
      seed: of the order of the training sequences.
    """

    corpus: str = "corpora/stdlib"
    source: str | None = "stdlib"
    mixtures: tuple[MixtureConfig, ...] = ()
    mixture: str | None = None
    tokenizer: str = "byte"
    sequence_length: int = 4096
    batch_size: int = 4096
    batch_ramp: tuple[tuple[int, int], ...] = ()
    seed: int = 0

    def __post_init__(self):
        _require_positive("data", self, "batch_size")
        _require_seed("data", self.seed)
        _require(
            self.sequence_length > 1,
            f"data.sequence_length is {self.sequence_length}; it must be at least 2: a token and its target",
        )
        _require(self.corpus != "", "data.corpus is empty; it must be the folder of the token shards")
        names = [mixture.name for mixture in self.mixtures]
        _require_different("data.mixtures", names)
        _require(
            self.mixture is None or self.mixture in names,
            f'data.mixture is "{self.mixture}"; it must be a name in data.mixtures, which has '
            f"{', '.join(names) or 'none'}, or None for data.corpus",
        )
        self._check_ramp()

    def _check_ramp(self) -> None:
        before = 0
        for steps, tokens in self.batch_ramp:
            _require(
                steps > 0,
                f"data.batch_ramp has {steps} steps of {tokens} tokens; its pairs are (steps, tokens of "
                "each), with at least 1 step",
            )
            _require(
                tokens > 0 and tokens % self.sequence_length == 0,
                f"data.batch_ramp has steps of {tokens} tokens; they must be whole sequences, a multiple of "
                f"data.sequence_length, {self.sequence_length}",
            )
            _require(
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
        """Steps of the ramp."""
        return sum(steps for steps, _ in self.batch_ramp)

    def steps_for(self, tokens: int) -> int:
        """The fewest steps that read so many tokens.

        Raises:
          ValueError: when the ramp alone reads as many.
        """
        left = tokens - sum(steps * size for steps, size in self.batch_ramp)
        _require(
            left > 0,
            f"data.batch_ramp reads {tokens - left} tokens; it must read fewer than the phase, {tokens}",
        )
        return self.ramp_steps + -(-left // self.batch_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients move weights. The split between the two is declared with each weight.

    Attributes:
      name: "muon" moves matrices by Muon and the rest by AdamW; "adamw" moves all by AdamW.
      schedule: what follows the warm-up: "constant"; "linear" or "cosine" to `final_learning_rate`
        at the last step; "warmup_stable_decay", constant and then linear over `decay_steps`.
      learning_rate: at the end of the warm-up.
      final_learning_rate: at the last step; "constant" has none.
      warmup_steps: of linear growth from 0.
      decay_steps: the last steps, in which "warmup_stable_decay" decays.
      weight_decay: decoupled, times the learning rate; not on scales, biases and temperatures.
      momentum: of Muon, with Nesterov's look-ahead.
      momentum_dtype: in which Muon's momentum is kept.
      newton_schulz: polynomials of Muon's orthogonalisation: "jordan" is the first, "polar_express"
        (arXiv 2505.16932) comes nearer to orthogonal in as many steps.
      newton_schulz_steps: of the orthogonalisation.
      newton_schulz_dtype: of its products.
      newton_schulz_implementation: None is as `ModelConfig.implementation` says.
      beta1: AdamW's decay of the mean.
      beta2: AdamW's decay of the mean square.
      eps: AdamW's, added to the root of the mean square.
      clip_norm: the global gradient norm is scaled down to this.
    """

    name: Literal["muon", "adamw"] = "muon"
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "cosine"
    learning_rate: float = 6e-4
    final_learning_rate: float = 2e-4
    warmup_steps: int = 2000
    decay_steps: int = 0
    weight_decay: float = 0.1
    momentum: float = 0.95
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    newton_schulz: Literal["jordan", "polar_express"] = "jordan"
    newton_schulz_steps: int = 5
    newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32"
    newton_schulz_implementation: Literal["xla", "pallas"] | None = None
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0

    def __post_init__(self):
        _check_choices("optimizer", self)
        _require_positive("optimizer", self, "learning_rate", "newton_schulz_steps", "eps", "clip_norm")
        for name in ("final_learning_rate", "warmup_steps", "weight_decay"):
            _require(
                getattr(self, name) >= 0, f"optimizer.{name} is {getattr(self, name)}; it must be 0 or above"
            )
        for name in ("momentum", "beta1", "beta2"):
            value = getattr(self, name)
            _require(
                0 <= value < 1, f"optimizer.{name} is {value}; it must be from 0 up to, not including, 1"
            )
        _require(
            (self.decay_steps > 0) == (self.schedule == "warmup_stable_decay"),
            f'optimizer.decay_steps is {self.decay_steps} and optimizer.schedule "{self.schedule}"; '
            'decay_steps must be above 0 with "warmup_stable_decay", and 0 with the others',
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalancingConfig:
    """The controller that keeps the experts evenly loaded ([8B] II-A-2).

    The error of an expert is its share of the tokens less 1/E. The paper's rule is AdamW with the
    error as gradient; it does not publish the values, and these are ours.

    Attributes:
      rule: what moves a bias against its error: "adamw", "sign" (DeepSeek-V3: always by the learning
        rate) or "pid" (proportional, integral, derivative).
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
        _check_choices("balancing", self)
        _require(
            self.learning_rate >= 0,
            f"balancing.learning_rate is {self.learning_rate}; it must be 0 (off) or above",
        )
        _require_positive("balancing", self, "eps")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(
                0 <= value < 1, f"balancing.{name} is {value}; it must be from 0 up to, not including, 1"
            )
        for name in ("proportional", "derivative"):
            value = getattr(self, name)
            _require(value >= 0, f"balancing.{name} is {value}; it must be 0 or above")
        _require(
            self.skip_share is None or 0 <= self.skip_share < 1,
            f"balancing.skip_share is {self.skip_share}; it must be from 0 up to, not including, 1, or None "
            "for a bias that stays put",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The run around the step.

    Attributes:
      num_steps: optimiser steps; of a run with phases, those of all phases together.
      num_microbatches: parts that a step's batch is cut into, to save memory; a smaller batch of a
        ramp is cut into fewer.
      gradient_dtype: in which gradients are added up over microbatches and devices. "bfloat16"
        halves what is sent and kept; scales and biases stay float32.
      loss_chunk: tokens of a device whose logits exist at the same time; the kernel has none in memory.
      loss_implementation: of the head and its cross-entropy; None is as `ModelConfig.implementation` says.
      z_loss: weight of the squared log of the softmax's denominator, which keeps logits from
        drifting (PaLM, arXiv 2204.02311 section 5); 0 is off.
      seed: of the initial weights and of everything random later.
      log_every: steps between two lines of metrics.
      eval_every: steps between two held-out losses; there is always one at the end.
      eval_sequences: held-out sequences that are scored; None scores all.
      checkpoint_every: steps between two checkpoints; there is always one at the end.
      keep_checkpoints: how many of the newest checkpoints stay.
      sample_tokens: length of the sample at the end of the run; 0 for none.
      init_from: a run folder whose newest weights this run starts from; None starts from random ones.
    """

    num_steps: int = 1000
    num_microbatches: int = 1
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    loss_chunk: int = 4096
    loss_implementation: Literal["xla", "pallas"] | None = None
    z_loss: float = 0.0
    seed: int = 0
    log_every: int = 10
    eval_every: int = 500
    eval_sequences: int | None = None
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    sample_tokens: int = 256
    init_from: str | None = None

    def __post_init__(self):
        _check_choices("train", self)
        _require(self.z_loss >= 0, f"train.z_loss is {self.z_loss}; it must be 0 (off) or above")
        _require_positive(
            "train", self, "num_steps", "num_microbatches", "loss_chunk", "log_every", "eval_every",
            "checkpoint_every", "keep_checkpoints",
        )  # fmt: skip
        _require_seed("train", self.seed)
        _require(
            self.sample_tokens >= 0, f"train.sample_tokens is {self.sample_tokens}; it must be 0 or above"
        )
        _require(
            self.eval_sequences is None or self.eval_sequences > 0,
            f"train.eval_sequences is {self.eval_sequences}; it must be above 0, or None for all",
        )


PHASE_FIELDS = {
    "model": ("rope_theta", "sliding_rope_theta", "remat"),
    "data": ("mixture", "sequence_length", "batch_size", "batch_ramp"),
    "optimizer": (
        "schedule", "learning_rate", "final_learning_rate", "warmup_steps", "decay_steps", "weight_decay",
        "momentum", "newton_schulz_steps", "beta1", "beta2", "eps", "clip_norm",
    ),
    "balancing": (
        "learning_rate", "beta1", "beta2", "eps", "proportional", "derivative", "skip_share",
    ),
    "train": ("num_microbatches",),
}  # fmt: skip
"""What a phase may have otherwise than the run: what leaves the shapes of the state as they are."""
SECTIONS = {"model": ModelConfig, "data": DataConfig, "optimizer": OptimizerConfig,
            "balancing": BalancingConfig, "train": TrainConfig}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """A part of a run: how long it is, and what it has otherwise than the config around it.

    Attributes:
      name: of the phase, in the progress line and for `--config.phases.NAME.SECTION.FIELD=VALUE`.
      tokens: that the phase reads; its last step may go past them. None where `steps` says it.
      steps: of the phase. None where `tokens` says it.
      model: fields of the section that the phase sets anew; which it can are in `PHASE_FIELDS`.
      data: the same.
      optimizer: the same.
      balancing: the same.
      train: the same.
    """

    name: str
    tokens: int | None = None
    steps: int | None = None
    model: dict = dataclasses.field(default_factory=dict)
    data: dict = dataclasses.field(default_factory=dict)
    optimizer: dict = dataclasses.field(default_factory=dict)
    balancing: dict = dataclasses.field(default_factory=dict)
    train: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        _require_name("phases", self.name)
        path = f"phases.{self.name}"
        _require(
            (self.tokens is None) != (self.steps is None),
            f"{path} has tokens {self.tokens} and steps {self.steps}; it must have one of them",
        )
        for name, value in (("tokens", self.tokens), ("steps", self.steps)):
            _require(value is None or value > 0, f"{path}.{name} is {value}; it must be above 0")
        for section in PHASE_FIELDS:
            # Of the types that the section has, so that a phase read from JSON equals the one written.
            object.__setattr__(self, section, _phase_values(path, section, getattr(self, section)))


def _phase_values(path: str, section: str, values: dict) -> dict:
    """What a phase sets in a section, checked and of its types."""
    allowed, hints = PHASE_FIELDS[section], typing.get_type_hints(SECTIONS[section])
    for field in values:
        _require(
            field in allowed,
            f"{path} sets {section}.{field}; of {section} a phase can set {', '.join(allowed)}",
        )
    return {field: convert(hints[field], v, f"{path}.{section}.{field}") for field, v in values.items()}


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a run, resolved.

    Attributes:
      name: of the phase.
      first_step: steps of the run before it.
      config: the run's, with what the phase sets; `train.num_steps` are the phase's own.
    """

    name: str
    first_step: int
    config: "Config"

    @property
    def end(self) -> int:
        """Steps of the run when the phase is done."""
        return self.first_step + self.config.train.num_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run.

    Attributes:
      run_folder: where the run keeps its config, metrics and checkpoints.
      model: the network.
      data: its tokens.
      optimizer: how weights move.
      balancing: how router biases move.
      train: the run around the step.
      phases: the parts of the run, one after the other; without any, the run is one phase of
        `train.num_steps`.
    """

    run_folder: str = "runs/unnamed"
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    balancing: BalancingConfig = dataclasses.field(default_factory=BalancingConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    phases: tuple[PhaseConfig, ...] = ()

    def __post_init__(self):
        _require(self.run_folder != "", "run_folder is empty; it must name the folder of the run")
        if self.phases:
            self._check_phases()
        else:
            self._check_phase()

    def _check_phases(self) -> None:
        _require_different("phases", [phase.name for phase in self.phases])
        total = self.resolved_phases[-1].end
        _require(
            self.train.num_steps == total,
            f"train.num_steps is {self.train.num_steps}, and the phases have {total} steps in all; it "
            "must be the same, or be left out",
        )

    def _check_phase(self) -> None:
        _require(
            self.data.sequence_length <= self.model.max_position_embeddings,
            f"data.sequence_length is {self.data.sequence_length}; model.max_position_embeddings allows "
            f"{self.model.max_position_embeddings}",
        )
        _require(
            self.data.batch_size % self.train.num_microbatches == 0,
            f"data.batch_size is {self.data.batch_size}; it must be a multiple of train.num_microbatches, "
            f"{self.train.num_microbatches}",
        )
        steps = self.train.num_steps
        _require(
            self.optimizer.warmup_steps < steps,
            f"optimizer.warmup_steps is {self.optimizer.warmup_steps}; it must be below train.num_steps, "
            f"{steps}",
        )
        _require(
            self.optimizer.warmup_steps + self.optimizer.decay_steps <= steps,
            f"optimizer.warmup_steps + decay_steps is {self.optimizer.warmup_steps} + "
            f"{self.optimizer.decay_steps}; together they must be at most train.num_steps, {steps}",
        )
        _require(
            self.data.ramp_steps < steps,
            f"data.batch_ramp has {self.data.ramp_steps} steps; it must end before train.num_steps, {steps}",
        )

    @functools.cached_property
    def resolved_phases(self) -> tuple[Phase, ...]:
        """The phases as whole configs; a run without phases is one phase without a name."""
        if not self.phases:
            return (Phase("", 0, self),)
        values, resolved, step = dataclasses.asdict(self), [], 0
        for phase in self.phases:
            resolved.append(Phase(phase.name, step, _resolve(values, phase)))
            step = resolved[-1].end
        return tuple(resolved)

    def phase_at(self, step: int) -> Phase:
        """The phase that makes step `step`, counted from 1; the first and last go on outside."""
        return next((phase for phase in self.resolved_phases if step <= phase.end), self.resolved_phases[-1])

    @classmethod
    def from_dict(cls, values: ConfigDict | dict) -> "Config":
        """Builds and checks a config from the `ConfigDict` of a config file.

        Raises:
          ValueError: for an unknown field, a value of the wrong type, or a value that cannot be.
        """
        plain = to_plain(values)
        if plain.get("phases") and all(isinstance(plain.get(name, {}), dict) for name in SECTIONS):
            phases = convert(tuple[PhaseConfig, ...], plain["phases"], "phases")
            total = sum(_num_steps(plain, phase) for phase in phases)
            plain = plain | {"train": {"num_steps": total} | plain.get("train", {})}
        return build(cls, plain, "")

    def to_text(self) -> str:
        """The resolved config as JSON, one field a line: what a run folder keeps."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "Config":
        """Reads what `to_text` wrote."""
        return cls.from_dict(json.loads(text))


def _resolve(values: dict, phase: PhaseConfig) -> Config:
    """The config of a phase, from the values around it."""
    merged = _merge(values, phase)
    merged["train"]["num_steps"] = _num_steps(values, phase)
    with in_phase(phase.name):
        return build(Config, merged, "")


def _num_steps(values: dict, phase: PhaseConfig) -> int:
    if phase.steps is not None:
        return phase.steps
    assert phase.tokens is not None, "a phase has steps or tokens"
    with in_phase(phase.name):
        return build(DataConfig, _merge(values, phase)["data"], "data").steps_for(phase.tokens)


def _merge(values: dict, phase: PhaseConfig) -> dict:
    sections = {name: values.get(name, {}) | getattr(phase, name) for name in PHASE_FIELDS}
    return values | sections | {"phases": ()}


@contextlib.contextmanager
def in_phase(name: str) -> Iterator[None]:
    """Says of a mistake in which phase it is, where phases have names.

    Raises:
      ValueError: in place of one that comes up within.
    """
    try:
        yield
    except ValueError as error:
        if not name:
            raise
        raise ValueError(f"in phase {name}: {error}") from error


def differences(ours: Config, theirs: Config) -> list[str]:
    """Fields in which two configs differ, as "section.field: theirs -> ours"."""
    new, old = dict(flatten(ours)), dict(flatten(theirs))
    return [
        f"{name}: {old.get(name)} -> {new.get(name)}"
        for name in dict.fromkeys((*new, *old))
        if new.get(name) != old.get(name)
    ]


def find_config(name: str) -> pathlib.Path:
    """The file that `--config=NAME` means: from here, else from the project's own configs/.

    Raises:
      ValueError: when there is no such file.
    """
    package = pathlib.Path(__file__).resolve().parent
    for folder in (pathlib.Path.cwd(), package.parent, package):
        if (path := folder / name).is_file():
            return path
    found = sorted(p.name for f in (package.parent, package) for p in (f / "configs").glob("*.py"))
    raise ValueError(f"no config file at {name}; configs/ has {', '.join(found)}")


def _check_choices(section: str, config: Any) -> None:
    """Checks every field whose type names its choices."""
    for name, hint in typing.get_type_hints(type(config)).items():
        options = (hint,) if typing.get_origin(hint) is Literal else typing.get_args(hint)
        choices = [c for o in options if typing.get_origin(o) is Literal for c in typing.get_args(o)]
        value = getattr(config, name)
        if choices and value is not None and value not in choices:
            raise ValueError(f"{section}.{name} is {value!r}; it must be {describe_types(options)}")

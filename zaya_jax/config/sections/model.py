"""Section `model`: the architecture."""

import dataclasses
from typing import Literal

from zaya_jax.config.rules import require, require_choices, require_positive
from zaya_jax.fields import build

HYBRID = "hybrid"
HYBRID_SLIDING = "hybrid_sliding"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture, in the terms of Hugging Face's config. Defaults are ZAYA1-8B's ([ZAYA1-8B] Table I).

    Attributes:
      vocab_size: V, rows of the tied embedding.
      hidden_size: D, width of the residual stream.
      num_hidden_layers: L, number of layers; each has one attention and one mixture-of-experts block.
      num_attention_heads: N, query heads.
      num_key_value_heads: K, key and value heads. This or the head width must be even: half of the value
        channels come from the previous token.
      head_dim: H, width of a head.
      attention: "cca", or another variant registered in `zaya_jax.model.attention.block.VARIANTS`.
      cca_time0: kernel size of the depthwise convolution over time, in tokens.
      cca_time1: kernel size of the per-head convolution over time, in tokens.
      layer_pattern: types of layers, repeated over the depth: "hybrid" attends to all earlier tokens,
        "hybrid_sliding" to the last `sliding_window`.
      sliding_window: number of tokens that a sliding layer attends to, the current one included.
      rope_theta: base of the rotary embedding of "hybrid" layers.
      sliding_rope_theta: base of the rotary embedding of "hybrid_sliding" layers.
      partial_rotary_factor: fraction of each head's channels that are rotated.
      moe_intermediate_size: F, width of an expert.
      num_experts: E, experts per layer, without the skip class.
      router: "mlp" is ZAYA1's; "linear" is the plain router that the paper compares it with.
      router_hidden_size: R, width of the router's state.
      skip_class: output for a token that selects the skip class: "zero" (Hugging Face), or "identity", the
        router's probability times the block's normalized input (ZAYA1-base).
      rms_norm_eps: value added to the mean square in every RMSNorm, so that a row of zeros is not divided by
        0.
      initializer_range: standard deviation of the initial weights.
      lm_head_bias: whether the tied head has a bias.
      max_position_embeddings: maximum sequence length in tokens.
    """

    vocab_size: int = 262_272
    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 128
    attention: str = "cca"
    cca_time0: int = 2
    cca_time1: int = 2
    # A pattern instead of one entry per layer, so that the depth can be changed by one field.
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

    def __post_init__(self):
        require_choices("model", self)
        require_positive(
            "model", self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "cca_time0", "cca_time1", "rope_theta", "sliding_rope_theta",
            "moe_intermediate_size", "num_experts", "router_hidden_size", "rms_norm_eps", "initializer_range",
            "max_position_embeddings",
        )  # fmt: skip
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"model.num_attention_heads is {self.num_attention_heads}; it must be a multiple of "
            f"model.num_key_value_heads, {self.num_key_value_heads}",
        )
        require(
            self.num_key_value_heads * self.head_dim % 2 == 0,
            f"model.num_key_value_heads x model.head_dim is {self.num_key_value_heads} x {self.head_dim}; it "
            "must be even, because half of the value channels come from the previous token",
        )
        # [RoPE] rotates pairs of channels, so their number must be even.
        rotary = self.head_dim * self.partial_rotary_factor
        require(
            0 < self.partial_rotary_factor <= 1 and rotary == int(rotary) and rotary % 2 == 0,
            f"model.partial_rotary_factor is {self.partial_rotary_factor}; with model.head_dim "
            f"{self.head_dim} it must rotate an even number of channels, from 2 to {self.head_dim}",
        )
        self._check_pattern()

    def _check_pattern(self) -> None:
        require(
            len(self.layer_pattern) > 0,
            f'model.layer_pattern is empty; set it to ("{HYBRID}",) for full attention in every layer',
        )
        for kind in self.layer_pattern:
            require(
                kind in (HYBRID, HYBRID_SLIDING),
                f'model.layer_pattern has "{kind}"; its entries must be "{HYBRID}" or "{HYBRID_SLIDING}"',
            )
        # A window without sliding layers is allowed: exported configs of Hugging Face contain one.
        if HYBRID_SLIDING in self.layer_pattern:
            require(
                self.sliding_window is not None and self.sliding_window > 0,
                f'model.sliding_window is {self.sliding_window}; with "{HYBRID_SLIDING}" layers it must be '
                "the number of tokens they attend to, the current one included",
            )

    @classmethod
    def from_dict(cls, values: dict) -> "ModelConfig":
        """Builds and validates a model config from plain values, as `Config.from_dict` does."""
        return build(cls, values, "model")

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Type of each layer, [L]."""
        period = len(self.layer_pattern)
        return tuple(self.layer_pattern[i % period] for i in range(self.num_hidden_layers))

    @property
    def rotary_dim(self) -> int:
        """Number of channels of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def num_router_classes(self) -> int:
        """X, number of experts plus the skip class."""
        # The router treats skipping as one more class ([ZAYA1-8B] section II-A-2).
        return self.num_experts + 1

    @property
    def conv_tail(self) -> int:
        """Number of earlier tokens in the receptive field of the two convolutions together."""
        # A convolution with a kernel of k tokens needs k - 1 earlier ones, and the two are consecutive.
        return self.cca_time0 + self.cca_time1 - 2

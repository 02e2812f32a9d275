"""Section `execution`: how a run is computed; all of it may change when a run resumes."""

import dataclasses
from typing import Literal

from zaya_jax.config.rules import require_choices, require_not_negative, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How model, loss and optimizer are computed: their cost, not what is learned.

    The shapes of the weights do not depend on it, and results only by rounding.

    Attributes:
      dtype: type of activations and matrix products; parameters and the residual stream are float32.
      remat: what the backward pass recomputes. Each policy keeps less than the previous one and recomputes
        more. "none" recomputes nothing. "products" keeps the results of plain matrix products, attention and
        experts. "attention_and_experts" keeps only the results of attention and of the experts' products.
        "block" keeps the residual stream before each attention block and each expert block. "layer" keeps the
        stream before each layer. "group" keeps the stream before each group of about
        sqrt(num_hidden_layers) layers and computes each layer twice more: once for the streams within its
        group, once for its own backward pass.
      scan_layers: compile one layer and loop over it. False unrolls the layers: compilation takes
        num_hidden_layers times as long, but a training step does not copy activations into and out of
        stacked buffers. A forward pass alone is faster as a loop.
      num_microbatches: number of parts that the batch of a step is split into to save memory (gradient
        accumulation). The smaller batches of a ramp are split into fewer.
      gradient_dtype: type of a device's gradients and of their sum over microbatches. "bfloat16" halves that
        memory; scales and biases stay float32. Sums over devices are always float32: where the experts are
        sharded over a node, gradients are sent in this type and their owners sum them in float32.
      read_threads: threads per process that prefetch batches; up to twice as many batches are queued. More
        threads hide a slow file system. 0 reads each batch when its step starts.
      context_devices: number of devices that share the tokens of each sequence (context parallelism); each
        has one early and one late chunk, so the sequence length must be a multiple of twice this number. The
        remaining factor of the devices is data parallel.
      node_devices: number of neighboring devices with fast links, such as the 8 GPUs of a node, that share
        the experts: each stores some experts of every layer and all-gathers the others for the forward and
        again for the backward pass. Gradients are summed within the node first. This saves memory; tokens
        never leave their device. With remat "none" the gathered experts are kept, which saves little. With
        one microbatch and Muon, experts of the next layer are prefetched during a layer, and gradients of a
        layer are sent during the next layer's backward pass.
      context_attention: how the queries of a context-parallel device reach all keys. "gathered" all-gathers
        keys and values, one layer at a time. "ring" passes them from device to device: it needs the least
        memory and takes longer.
      loss_chunk: tokens per device whose logits, or exponentials of them, exist at the same time; with
        `loss_implementation` "pallas" there are none.
      implementation: implementation of every operation that has a kernel and no setting in a field below:
        "pallas" is the kernel, "xla" plain operations compiled by XLA. None selects what
        `pallas_kernels/choice.py` has measured as best for the platform.
      attention_implementation: attention in training. Two forms of "xla" can be selected: "full" computes all
        scores of a layer at once, "blockwise" one pair of blocks at a time; "xla" means the latter from 1,024
        tokens (1,024 x 1,024 scores) on. For this and all fields below, None means `implementation`.
      decode_implementation: attention of new tokens to the cache.
      experts_implementation: products of the experts. Two forms of "xla" can be selected: "blocked", its
        default on CPUs, and "ragged_dot". "ragged_dot+pallas" is the vendor's product for the forward pass
        and the kernel for gradients. "primus_turbo" is AMD's package of that name.
      residual_implementation: residual merge and norm between attention and experts; the kernel does both in
        one pass.
      cca_implementation: queries and keys from latents, with both convolutions; the kernel does all of it in
        one pass.
      loss_implementation: output head and cross-entropy. "xla" stores float32 logits. "pallas+xla" is a
        kernel that stores their exponentials in `dtype`, and XLA for gradients. "pallas" stores neither and
        computes the logits twice.
      newton_schulz_implementation: Muon's orthogonalization.
    """

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    remat: Literal["none", "products", "attention_and_experts", "block", "layer", "group"] = "none"
    # A loop keeps the compile time of 40 layers that of one.
    scan_layers: bool = True
    num_microbatches: int = 1
    # Sums over microbatches lose small terms in bfloat16, so float32 is the default.
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    read_threads: int = 2
    context_devices: int = 1
    node_devices: int = 1
    context_attention: Literal["gathered", "ring"] = "gathered"
    # Logits of 4,096 tokens and 262,272 classes are 4 GiB in float32.
    loss_chunk: int = 4096
    implementation: Literal["xla", "pallas"] | None = None
    attention_implementation: Literal["full", "blockwise", "xla", "pallas"] | None = None
    decode_implementation: Literal["xla", "pallas"] | None = None
    experts_implementation: (
        Literal["blocked", "ragged_dot", "xla", "pallas", "ragged_dot+pallas", "primus_turbo"] | None
    ) = None
    residual_implementation: Literal["xla", "pallas"] | None = None
    cca_implementation: Literal["xla", "pallas"] | None = None
    loss_implementation: Literal["xla", "pallas", "pallas+xla"] | None = None
    newton_schulz_implementation: Literal["xla", "pallas"] | None = None

    def implementation_of(self, operation: str) -> str | None:
        """The implementation of an operation such as "loss": its own field, else `implementation`."""
        # Each operation has a field named after it; `getattr` fails for an operation without one.
        return getattr(self, f"{operation}_implementation") or self.implementation

    def __post_init__(self):
        require_choices("execution", self)
        require_positive(
            "execution", self, "num_microbatches", "context_devices", "loss_chunk", "node_devices"
        )
        require_not_negative("execution", self, "read_threads")

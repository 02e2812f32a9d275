"""The section `execution`: how a run is computed, which may change while it goes on."""

import dataclasses
from typing import Literal

from zaya_jax.config.rules import require, require_choices, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How network, loss and optimiser are computed: what it takes, not what is learned.

    No weight's shape depends on it, and up to rounding no result.

    Attributes:
      dtype: type of activations and matrix products; parameters and the stream are float32.
      remat: what the backward pass recomputes. "none": nothing. "products": all but plain matrix
        products, attention and experts, whose results are kept. "attention_and_experts": keeps of
        each layer the results of attention and of the experts' products alone. "block": keeps the
        stream before each attention and each block of experts. "layer": keeps the stream before each
        layer. "group": keeps the stream before each group of about sqrt(num_hidden_layers) layers, and
        computes each layer twice more: for the streams within the group, and for its own backward pass.
        Each keeps less than the one before and computes more.
      scan_layers: compiles one layer and loops over it. False compiles each on its own, in as many times
        the time: a training step then neither stacks what the layers keep for the backward pass nor copies
        out of the stacks. A forward pass alone is faster as a loop.
      num_microbatches: parts that a step's batch is cut into, to save memory; a smaller batch of a
        ramp is cut into fewer.
      gradient_dtype: in which a device keeps its gradients and adds them up over microbatches. "bfloat16"
        halves that memory; scales and biases stay float32. Over devices they are always added in float32;
        where a node shares its experts they travel in this type, and their owners add them up.
      read_threads: of each process, that read batches ahead of the step, one each at a time; twice as many
        batches may wait. More threads hide a slow file system. 0 reads a batch when its step asks for it.
      context_devices: that share the tokens of each sequence, each an early and a late chunk; the length
        must be a multiple of twice as many. The others have other rows of the batch.
      node_devices: that share the experts, as neighbours between whom links are fast, such as the 8 GPUs of
        a node: each stores some experts of every layer, and gathers the others' when a layer is computed, and
        again for its backward pass. Gradients are summed among them first. It saves memory; no token leaves
        its device. With remat "none" the gathered experts are kept, and little is saved. With one
        microbatch and Muon, experts come from other nodes while the layer before is computed, and their
        gradients leave while that one's are.
      context_attention: how their queries find all keys. "gathered": each device has those of the whole
        sequence, a layer at a time. "ring": keys go from device to device, and none has more than its own
        and those on their way; it takes longer and the least memory.
      loss_chunk: tokens of a device whose logits exist at the same time; the kernel has none in memory.
      implementation: of every operation that has a kernel and is not named in a field of its own:
        "pallas" is the kernel, "xla" what XLA makes of plain operations. None takes what
        `pallas_kernels/choice.py` says is best on the platform.
      attention_implementation: in training. Two forms of "xla" can be named: "full" makes all scores of
        a layer at once, "blockwise" those of a pair of blocks at a time; it takes the latter for as many
        scores as 1,024 tokens have with themselves or more. This and the fields below: None is as
        `implementation` says.
      decode_implementation: of a new token's attention to the cache.
      experts_implementation: two forms of "xla" can be named: "blocked", which it takes on CPUs, and
        "ragged_dot". "ragged_dot+pallas" is the vendor's product forward and the kernel for gradients,
        "primus_turbo" AMD's package of that name.
      residual_implementation: of the step from attention to experts, where the stream is merged and
        normed; the kernel does both in one pass.
      cca_implementation: of the step from latents to queries and keys, with both convolutions; the kernel
        does all of it in one pass.
      loss_implementation: of the head and its cross-entropy.
      newton_schulz_implementation: of Muon's orthogonalisation.
    """

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    remat: Literal["none", "products", "attention_and_experts", "block", "layer", "group"] = "none"
    scan_layers: bool = True
    num_microbatches: int = 1
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    read_threads: int = 2
    context_devices: int = 1
    node_devices: int = 1
    context_attention: Literal["gathered", "ring"] = "gathered"
    loss_chunk: int = 4096
    implementation: Literal["xla", "pallas"] | None = None
    attention_implementation: Literal["full", "blockwise", "xla", "pallas"] | None = None
    decode_implementation: Literal["xla", "pallas"] | None = None
    experts_implementation: (
        Literal["blocked", "ragged_dot", "xla", "pallas", "ragged_dot+pallas", "primus_turbo"] | None
    ) = None
    residual_implementation: Literal["xla", "pallas"] | None = None
    cca_implementation: Literal["xla", "pallas"] | None = None
    loss_implementation: Literal["xla", "pallas"] | None = None
    newton_schulz_implementation: Literal["xla", "pallas"] | None = None

    def implementation_of(self, operation: str) -> str | None:
        """What is asked of an operation, "attention" or "loss": its own field, else `implementation`."""
        return getattr(self, f"{operation}_implementation") or self.implementation

    def __post_init__(self):
        require_choices("execution", self)
        require_positive(
            "execution", self, "num_microbatches", "context_devices", "loss_chunk", "node_devices"
        )
        require(
            self.read_threads >= 0,
            f"execution.read_threads is {self.read_threads}; it must be 0 or above",
        )

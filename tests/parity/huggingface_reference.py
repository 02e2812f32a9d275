"""A tiny `ZayaForCausalLM` in which no weight has its initial value, and our network with the same weights.

With initial values (ones, zeros) a forgotten scale or bias would be invisible.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import ZayaConfig, ZayaForCausalLM

from zaya_jax.config import ExecutionConfig, ModelConfig
from zaya_jax.convert.pytorch.huggingface import by_path, config_from_huggingface, variables_from_huggingface
from zaya_jax.convert.pytorch.layouts import tensors_of as tensors_of_layout
from zaya_jax.model.zaya import Output, Zaya

DEFAULTS = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "router_hidden_size": 24,
    "eos_token_id": None,
}
TEXT = {"vocab_size": 259, "max_position_embeddings": 128}
TOLERANCE = 1e-4
EXECUTION = ExecutionConfig(dtype="float32")

"""Compiling is nearly all the time that these tests take; level 0 halves it."""


@functools.partial(jax.jit, static_argnums=0)
def apply(config: ModelConfig, variables: dict, *arguments, **named) -> Output:
    """`Zaya.apply`, compiled once for all cases of one config and one shape."""
    return typing.cast(Output, Zaya(config, EXECUTION).apply(variables, *arguments, **named))


@dataclasses.dataclass(frozen=True)
class Pair:
    """Returns both configs of one network."""

    reference: typing.Any
    """A `ZayaForCausalLM`; its methods' own types do not admit themselves."""
    config: ModelConfig
    variables: dict


def rope(full: float = 5e6, sliding: float = 1e4, factor: float = 0.5) -> dict:
    return {
        kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor}
        for kind, theta in (("hybrid", full), ("hybrid_sliding", sliding))
    }


def build(seed: int, *, attention: str = "eager", **fields) -> Pair:
    """Returns both networks, with the same random weights."""
    settings: dict[str, typing.Any] = DEFAULTS | fields | {"attn_implementation": attention}
    reference = ZayaForCausalLM(ZayaConfig(**settings)).eval()
    randomise(reference, seed)
    config = config_from_huggingface(reference.config.to_dict())
    variables = variables_from_huggingface(config, tensors_of(reference))
    return Pair(reference, config, jax.tree.map(jnp.asarray, variables))


def build_released(seed: int, **fields) -> Pair:
    """`build` for texts of bytes, with the skip class's bias as released.

    It is -1, because transformers sets it to that whenever it loads weights.
    """
    pair = build(seed, **(TEXT | fields))
    bias_LX = np.array(pair.variables["router_bias"]["layers"])
    bias_LX[:, -1] = -1.0
    for layer, bias_X in zip(pair.reference.model.layers, bias_LX, strict=True):
        layer.mlp.gate.balancing_biases.data = torch.from_numpy(bias_X)
    variables = pair.variables | {"router_bias": {"layers": jnp.asarray(bias_LX)}}
    return dataclasses.replace(pair, variables=variables)


def tensors_of(reference: ZayaForCausalLM) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in reference.state_dict().items()}


def randomise(reference: ZayaForCausalLM, seed: int) -> None:
    """Draws new values for every parameter and buffer, at scales that keep activations near one."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, tensor in reference.state_dict().items():
            if name != "lm_head.weight":  # tied
                tensor.copy_(torch.from_numpy(random_value(rng, name, tuple(tensor.shape))))


def random_value(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    normal = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("balancing_biases"):
        return 0.05 * normal  # the skip class's as well: it must win sometimes
    if name.endswith("temp"):
        return rng.uniform(0.5, 2.0, shape).astype(np.float32)
    if name.endswith("bias"):
        return 0.3 * normal
    if name == "model.norm.weight":
        return normal  # of both signs, or the tied head would repeat every token
    if len(shape) == 1:
        return 1 + 0.3 * normal
    if name.endswith("embed_tokens.weight"):
        return 2 * normal
    fan_in = shape[1] * shape[2] if "conv_qk" in name else shape[-1]
    return _gain(name) * fan_in**-0.5 * normal


def _gain(name: str) -> float:
    """Scales weights by more than one where choices must be clear, or where a block must outweigh residual
    biases.

    The biases are equal for every token: greedy decoding would soon repeat one token forever.
    """
    clear = ("router_mlp.out_proj.weight", "self_attn.o_proj.weight", "experts.down_proj")
    return 3.0 if name.endswith(clear) else 1.0


def random_tokens(pair: Pair, seed: int, batch: int, time: int) -> np.ndarray:
    """Returns tokens from 1 on, because torch's embedding gives the padding token, 0, no gradient."""
    return np.random.default_rng(seed).integers(1, pair.config.vocab_size, (batch, time)).astype(np.int32)


def padding_mask(batch: int, time: int, padding: str | None) -> np.ndarray | None:
    """Returns 1 at tokens. Row b has 2b + 1 padding tokens on the given side, the last row none."""
    if padding is None:
        return None
    mask_BT = np.ones((batch, time), np.int32)
    for row in range(batch - 1):
        width = 2 * row + 1
        mask_BT[row, slice(0, width) if padding == "left" else slice(time - width, time)] = 0
    return mask_BT


@dataclasses.dataclass(frozen=True)
class Answer:
    logits_BTV: np.ndarray
    experts_LBT: np.ndarray


def ask_reference(pair: Pair, tokens_BT: np.ndarray, mask_BT: np.ndarray | None) -> Answer:
    """Returns logits, and the classes that the reference's routers chose."""
    choices = []

    def listen(gate, inputs, output):
        _, probs_P1, indices_P1, _ = output
        # The reference shows a skipped token as expert 0 with a weight of exactly zero.
        choices.append(torch.where(probs_P1 == 0, pair.config.num_experts, indices_P1).numpy())

    hooks = [layer.mlp.gate.register_forward_hook(listen) for layer in pair.reference.model.layers]
    with torch.no_grad():
        logits = pair.reference(
            torch.from_numpy(tokens_BT).long(),
            attention_mask=None if mask_BT is None else torch.from_numpy(mask_BT).long(),
            use_cache=False,
        ).logits
    for hook in hooks:
        hook.remove()
    return Answer(logits.numpy(), np.stack(choices).reshape(-1, *tokens_BT.shape))


def ask_ours(pair: Pair, tokens_BT: np.ndarray, mask_BT: np.ndarray | None) -> Answer:
    out = apply(pair.config, pair.variables, tokens_BT, None, mask_BT)
    return Answer(np.asarray(out.logits_BTV), np.asarray(out.router.experts_LBT))


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the largest absolute difference relative to the largest absolute value."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def variables_to_huggingface(config: ModelConfig, variables: dict) -> dict[str, np.ndarray]:
    """Returns our variables as Hugging Face's tensors in memory; exports are written slice by slice."""
    flat = {path: np.asarray(weight) for path, weight in by_path(config, variables).items()}
    tensors = {}
    for tensor in tensors_of_layout("native", config):
        parts = [tensor.layout.to_theirs(flat[part.path][part.index]).reshape(-1) for part in tensor.slices]
        tensors[tensor.name] = np.concatenate(parts).reshape(tensor.shape)
    return tensors

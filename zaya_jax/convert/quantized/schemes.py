"""How the quantized weights of a folder are stored, as the `quantization_config` of its config.json says.

Read are compressed-tensors' configs ([Compressed-tensors]), which Zyphra's FP8 and MXFP4 releases have too,
and transformers' "fp8" and "mxfp4". Written are compressed-tensors' configs.

A tensor's type tells its format and the shape of its scales tells how they are shared. The config must agree
with both. Its `targets` and `ignore` are not evaluated: they are regular expressions from an untrusted file.

Letters: R outputs, C inputs.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from zaya_jax.convert.quantized.codecs import CODECS, MX_BLOCK, Codec
from zaya_jax.errors import UserError

FIELDS = ("quantization_config", "compression_config")
"""Names of the config's section; the second one is that of earlier releases of compressed-tensors."""
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "mxfp4-pack-quantized")
_NOT_SUPPORTED = ("kv_cache_scheme", "sparsity_config", "transform_config")
"""Sections that change the weights or the computation."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the weights of a group of matrices are quantized.

    Attributes:
      codec: format of the values.
      strategy: weights that share a scale: "tensor" all, "channel" those of an output, "block" a rectangle,
        "group" some inputs of an output.
      block: outputs and inputs of a rectangle, for the strategies "block" and "group".
    """

    codec: Codec
    strategy: str
    block: tuple[int, int] | None = None

    def scales_shapes(self, num_rows: int, num_columns: int) -> tuple[tuple[int, ...], ...]:
        """Shapes that the scales of a matrix may have; the first one is the most common."""
        if self.strategy == "tensor":
            return ((1,), (), (1, 1))
        if self.strategy == "channel":
            return ((num_rows, 1), (num_rows,))
        assert self.block is not None, "checked when the config was read"
        rows, columns = self.block
        return ((math.ceil(num_rows / rows), math.ceil(num_columns / columns)),)

    def __str__(self) -> str:
        block = f" of {self.block[0]} x {self.block[1]}" if self.block is not None else ""
        return f"{self.codec.name} by {self.strategy}{block}"


def quantization_section(values: Mapping[str, Any]) -> Any:
    """The quantization config of a config.json; None if it has none."""
    return next((values[name] for name in FIELDS if values.get(name) is not None), None)


def read_schemes(values: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Schemes of a config.json; empty if the weights are not quantized.

    Raises:
      UserError: for a method or scheme that is not supported; the message names it.
    """
    section = quantization_section(values)
    if section is None:
        return ()
    method = section.get("quant_method") if isinstance(section, Mapping) else section
    if not isinstance(section, Mapping) or not isinstance(method, str) or method not in _METHODS:
        raise UserError(
            f"the weights are quantized by {_short(method)}, which is not supported; supported are "
            f"{', '.join(_METHODS)}; use the bfloat16 release that they were made from"
        )
    schemes = _METHODS[method](section)
    # A config without groups would leave values without scales.
    if not schemes:
        raise UserError(f"the quantization config by {method} has no group with quantized weights")
    return schemes


def _compressed_tensors(section: Mapping[str, Any]) -> tuple[Scheme, ...]:
    for name in _NOT_SUPPORTED:
        # An empty section, and one that says "dense", has no effect.
        if (value := section.get(name)) and value != {"format": "dense"}:
            raise UserError(f"{name} of the quantization config is {_short(value)}, which is not supported")
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise UserError(f"config_groups of the quantization config is {_short(groups)}; it must be a section")
    # A group may quantize activations only, which does not concern the weights.
    weights = {name: group["weights"] for name, group in groups.items() if group.get("weights") is not None}
    for name in weights:
        form = groups[name].get("format") or section.get("format")
        if form not in _FORMATS:
            raise UserError(
                f"format of {name} in the quantization config is {_short(form)}, which is not supported; "
                f"supported are {', '.join(_FORMATS)}"
            )
    return tuple(_scheme(name, group) for name, group in weights.items())


def _scheme(name: str, weights: Any) -> Scheme:
    """The scheme of a group's weights.

    Raises:
      UserError: if it is not supported; the message names it.
    """
    if not isinstance(weights, Mapping):
        raise UserError(
            f"weights of {name} in the quantization config is {_short(weights)}; it must be a section"
        )
    # Absent fields have the defaults of [Compressed-tensors].
    kind = f"{weights.get('type', 'int')} of {weights.get('num_bits', 8)} bits"[:80]
    strategy, size = weights.get("strategy"), weights.get("group_size")
    # The library's defaults, which it derives from the size of groups.
    strategy = strategy or ("tensor" if size is None else "channel" if size == -1 else "group")
    described = f"{kind} by {_short(strategy)}, groups of {_short(size)}"
    codec = {"float of 8 bits": "fp8", "int of 8 bits": "int8", "float of 4 bits": "mxfp4"}.get(kind, "")
    # NVFP4 has the same values, with groups of 16 and a second scale.
    is_mx = codec == "mxfp4" and strategy == "group" and size == MX_BLOCK
    is_plain = codec in ("fp8", "int8") and strategy in ("tensor", "channel", "block")
    if not (is_mx or is_plain) or not weights.get("symmetric", True) or weights.get("actorder"):
        more = "" if weights.get("symmetric", True) else ", asymmetric"
        more += f", actorder {_short(weights['actorder'])}" if weights.get("actorder") else ""
        raise UserError(
            f"{name} in the quantization config is {described}{more}, which is not supported; supported are "
            "float and int of 8 bits by tensor, channel or block, and float of 4 bits in groups of 32 (MXFP4)"
        )
    if strategy == "group":
        return Scheme(CODECS[codec], strategy, (1, MX_BLOCK))
    return Scheme(
        CODECS[codec], strategy, _block(weights.get("block_structure")) if strategy == "block" else None
    )


def _block(value: Any) -> tuple[int, int]:
    """The outputs and inputs of a block, as a list or as text such as "128x128"."""
    # Earlier releases wrote text.
    sizes = value.split("x") if isinstance(value, str) else value
    if isinstance(sizes, list) and len(sizes) == 2 and all(str(size).isdecimal() for size in sizes):
        rows, columns = (int(str(size)[:9]) for size in sizes)
        if rows and columns:
            return rows, columns
    raise UserError(
        f"blocks of the quantization config are {_short(value)}; they must be two sizes such as [128, 128]"
    )


def _transformers_fp8(section: Mapping[str, Any]) -> tuple[Scheme, ...]:
    # Without blocks the whole matrix has one scale.
    block = section.get("weight_block_size")
    if block is None:
        return (Scheme(CODECS["fp8"], "tensor"), Scheme(CODECS["fp8"], "channel"))
    return (Scheme(CODECS["fp8"], "block", _block(block)),)


def _transformers_mxfp4(section: Mapping[str, Any]) -> tuple[Scheme, ...]:
    del section
    return (Scheme(CODECS["mxfp4"], "group", (1, MX_BLOCK)),)


_METHODS = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _transformers_fp8,
    "mxfp4": _transformers_mxfp4,
}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def compressed_tensors_config(codec: Codec, *, with_embedding: bool) -> dict[str, Any]:
    """The `quantization_config` of an export, as compressed-tensors' presets FP8_DYNAMIC, W8A8 and MXFP4A16.

    vLLM and SGLang have 8-bit experts only with activations that are quantized per token while they compute,
    so the first two say so; the stored weights do not depend on it, and our engine computes with float
    activations.

    Args:
      codec: format of the experts.
      with_embedding: whether the embedding is int8 with one scale per token.
    """
    # Names of presets are not written: readers of other versions would not know them.
    number = {"fp8": "float", "int8": "int", "mxfp4": "float"}[codec.name]
    form = {"fp8": "float-quantized", "int8": "int-quantized", "mxfp4": "mxfp4-pack-quantized"}[codec.name]
    grouped: dict[str, Any] = {"strategy": "group", "group_size": MX_BLOCK, "scale_dtype": "torch.uint8"}
    # Fields that tell which weights share a scale.
    shared = grouped if codec.group_size else {"strategy": "channel"}
    weights = {"num_bits": codec.bits, "type": number, "symmetric": True, "dynamic": False, **shared}
    per_token = {"num_bits": 8, "type": number, "symmetric": True, "dynamic": True, "strategy": "token"}
    groups: dict[str, Any] = {
        "group_0": {
            "targets": [EXPERTS_TARGET],
            "weights": weights,
            "input_activations": None if codec.group_size else per_token,
            "output_activations": None,
            "format": form,
        }
    }
    if with_embedding:
        int8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
        groups["group_1"] = {
            "targets": ["re:.*embed_tokens$"],
            "weights": int8,
            "input_activations": None,
            "output_activations": None,
            "format": "int-quantized",
        }
    # The format of the whole model, which readers use where a group has none.
    mixed = "mixed-precision" if len({group["format"] for group in groups.values()}) > 1 else form
    return {
        "quant_method": "compressed-tensors",
        "format": mixed,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [_IGNORED_WITH_EMBEDDING if with_embedding else _IGNORED],
        "kv_cache_scheme": None,
    }


EXPERTS_TARGET = "re:.*mlp\\.experts\\..*"
# Everything else, as Zyphra's MXFP4 release says it: routers, convolutions, norms, the head.
_IGNORED = "re:^(?!.*experts).*$"
_IGNORED_WITH_EMBEDDING = "re:^(?!.*(experts|embed_tokens)).*$"

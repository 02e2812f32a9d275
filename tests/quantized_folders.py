"""Folders of quantized weights as releases have them, made from random bits, and their weights by hand."""

import fractions
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np

sys.path.append(str(pathlib.Path(__file__).parent / "convert"))
from small_weights import join, plausible_variables, random_variables, small_config, split, zaya

import zaya_jax
from zaya_jax.convert.quantized.codecs import QuantizedValues

__all__ = ["zaya"]
NETWORK = small_config(hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, vocab_size=264)
"""Rows of experts are multiples of 32, as MXFP4 needs."""
STACKS = {"gate_up_proj": (64, 64), "down_proj": (64, 32)}
"""Outputs and inputs of an expert's matrices."""
NUMPY = {"F8_E4M3": np.uint8, "I8": np.int8, "U8": np.uint8, "F32": np.float32, "BF16": np.uint16}


def e4m3(bits: int) -> float:
    """A float8 E4M3 number by the format's definition: bias 7, 3 bits of mantissa."""
    sign, exponent, mantissa = (-1) ** (bits >> 7), bits >> 3 & 0xF, bits & 7
    if exponent == 0:
        return sign * float(fractions.Fraction(mantissa, 8) / 2**6)
    return sign * float((1 + fractions.Fraction(mantissa, 8)) * fractions.Fraction(2) ** (exponent - 7))


def e2m1(bits: int) -> float:
    """An E2M1 number by the format's definition: bias 1, a bit of mantissa."""
    sign, exponent, mantissa = (-1) ** (bits >> 3), bits >> 1 & 3, bits & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def by_hand(name: str, quantized: QuantizedValues) -> np.ndarray:
    """Values times scales in float64, from the bits."""
    values, scales = quantized.values, quantized.scales
    if name == "mxfp4":
        nibbles = np.stack([values & 0xF, values >> 4], axis=-1).reshape(len(values), -1)
        numbers = np.array([e2m1(bits) for bits in range(16)])[nibbles]
        factors = np.array([2.0 ** (bits - 127) for bits in range(256)])[scales]
    else:
        e4m3_values = np.array([e4m3(bits) for bits in range(256)])
        numbers = e4m3_values[values] if name == "fp8" else values.astype(np.float64)
        factors = scales.astype(np.float64)
    return numbers * np.repeat(factors, numbers.shape[1] // factors.shape[1], axis=1)


def section(form: str = "float-quantized", **weights) -> dict:
    """A config of compressed-tensors with one group."""
    known = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": known | weights, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return {"quantization_config": config}


class Release:
    """A folder of PyTorch weights whose experts are replaced by quantized ones.

    Attributes:
      folder: path of the folder.
      tensors: name in safetensors of the type, and values, of each tensor.
      experts: weights of each stack by hand, float64 [E, R, C], by layer and name.
    """

    def __init__(self, folder: pathlib.Path, *, layout: str = "native"):
        self.folder, self.layout = folder, layout
        variables = random_variables(NETWORK, 0, "bfloat16")
        zaya_jax.save_pytorch(folder, zaya_jax.Zaya(NETWORK), variables, layout=layout, tokenizer="byte")
        header, data = split(folder / "model.safetensors")
        header.pop("__metadata__")
        self.tensors: dict[str, tuple[str, np.ndarray]] = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if "experts" not in name:
                values = np.frombuffer(data[start:end], NUMPY[entry["dtype"]]).reshape(entry["shape"])
                self.tensors[name] = entry["dtype"], values
        self.experts: dict[tuple[int, str], np.ndarray] = {}

    def save(self, quantization_config: Any) -> None:
        """Writes the tensors, and config.json with a quantization config."""
        entries, parts, offset = {}, [], 0
        for name, (dtype, values) in self.tensors.items():
            raw = np.ascontiguousarray(values).tobytes()
            span = [offset, offset + len(raw)]
            entries[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": span}
            parts.append(raw)
            offset += len(raw)
        (self.folder / "model.safetensors").write_bytes(join(entries, b"".join(parts)))
        config = json.loads((self.folder / "config.json").read_text())
        fields = {} if quantization_config is None else {"quantization_config": quantization_config}
        (self.folder / "config.json").write_text(json.dumps(config | fields))


def random_matrices(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Any bits of a format's values, [..., C] or [..., C / 2], without NaN."""
    rng = np.random.default_rng(seed)
    if name == "mxfp4":
        return rng.integers(0, 256, (*shape[:-1], shape[-1] // 2)).astype(np.uint8)
    if name == "int8":
        return rng.integers(-128, 128, shape).astype(np.int8)
    bits = rng.integers(0, 256, shape).astype(np.uint8)
    return np.where(bits & 0x7F == 0x7F, 0, bits).astype(np.uint8)


def random_scales(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Scales with which weights are about as large as those of a network."""
    rng = np.random.default_rng(seed)
    if name == "mxfp4":
        return rng.integers(118, 124, shape).astype(np.uint8)
    return (rng.uniform(0.5, 2, shape) * {"fp8": 1e-3, "int8": 1e-3}[name]).astype(np.float32)


def weights_by_hand(name: str, values: np.ndarray, scales_RG: np.ndarray) -> np.ndarray:
    """Float64 weights of one matrix, from scales that are shared by equal groups of inputs."""
    return by_hand(name, QuantizedValues(values, scales_RG))


def plausible(folder: pathlib.Path, dtype: str = "bfloat16") -> Any:
    """A folder of float weights with clear choices of experts."""
    variables = plausible_variables(NETWORK, 0)
    zaya_jax.save_pytorch(folder, zaya_jax.Zaya(NETWORK), variables, dtype=dtype, tokenizer="byte")
    return jax.tree.map(np.asarray, variables)

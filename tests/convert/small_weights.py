"""Small networks of all shapes that the layouts support, with random weights, and folders of them."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np

from zaya_jax import cli
from zaya_jax.config import ModelConfig
from zaya_jax.model.weights import abstract_variables

FULL, SLIDING = "hybrid", "hybrid_sliding"


def small_config(**fields) -> ModelConfig:
    """All sizes differ, so that no axis can be mistaken for another."""
    values = {
        "vocab_size": 70, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 12, "num_experts": 3,
        "router_hidden_size": 6, "max_position_embeddings": 128,
    }  # fmt: skip
    return ModelConfig(**(values | fields))


def random_config(seed: int) -> ModelConfig:
    """Odd seeds have sliding layers; every fourth has one layer, every fifth one expert, every third a head
    bias.
    """
    rng = np.random.default_rng(seed)
    keys = int(rng.integers(1, 4))
    slides = {"layer_pattern": (SLIDING, FULL), "sliding_window": int(rng.integers(2, 9))} if seed % 2 else {}
    return small_config(
        vocab_size=int(rng.integers(10, 90)),
        hidden_size=int(rng.integers(2, 30)),
        num_hidden_layers=1 if seed % 4 == 0 else int(rng.integers(2, 5)),
        num_key_value_heads=keys,
        num_attention_heads=keys * int(rng.integers(1, 4)),
        head_dim=4 * int(rng.integers(1, 4)),
        cca_time0=int(rng.integers(1, 4)),
        cca_time1=int(rng.integers(1, 4)),
        moe_intermediate_size=int(rng.integers(1, 20)),
        num_experts=1 if seed % 5 == 0 else int(rng.integers(2, 6)),
        router_hidden_size=int(rng.integers(1, 9)),
        lm_head_bias=seed % 3 == 0,
        rope_theta=float(rng.integers(1000, 9000)),
        sliding_rope_theta=float(rng.integers(1000, 9000)),
        rms_norm_eps=1e-6,
        **slides,
    )


def random_variables(config: ModelConfig, seed: int, dtype: str = "float32") -> dict:
    """Returns float32 arrays of random bits below 2, and balancing biases as released."""
    rng = np.random.default_rng(seed)
    unsigned, narrow = (np.uint16, ml_dtypes.bfloat16) if dtype == "bfloat16" else (np.uint32, np.float32)
    small = ~unsigned(1 << (8 * unsigned().itemsize - 2))  # clears the highest bit of the exponent

    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        bits = rng.integers(0, np.iinfo(unsigned).max, leaf.shape, unsigned, endpoint=True) & small
        return bits.view(narrow).astype(np.float32)

    return jax.tree.map(draw, abstract_variables(config)) | _router_bias(config, rng)


def plausible_variables(config: ModelConfig, seed: int) -> dict:
    """Returns weights that route tokens clearly, so that two implementations choose the same experts."""
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        return (0.5 * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree.map(draw, abstract_variables(config)) | _router_bias(config, rng)


def _router_bias(config: ModelConfig, rng: np.random.Generator) -> dict:
    bias_LX = rng.uniform(0, 0.1, (config.num_hidden_layers, config.num_router_classes))
    bias_LX[:, -1] = -1.0
    return {"router_bias": {"layers": bias_LX.astype(np.float32)}}


def zaya(command: str) -> None:
    """Runs `zaya COMMAND` in this process."""
    cli.main(command.split())


def contents(folder: pathlib.Path, *, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Returns the content of every file of a folder."""
    files = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in files.items() if name not in without}


def split(file: pathlib.Path) -> tuple[dict[str, Any], bytes]:
    """Parses header and data of a safetensors file, as its specification defines them."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def join(header: bytes | dict[str, Any], data: bytes) -> bytes:
    """Writes a safetensors file; the header may be any bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def edit_header(file: pathlib.Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a file's header in place, or replaces it by what `change` returns."""
    header, data = split(file)
    new = change(header)
    file.write_bytes(join(header if new is None else new, data))


def tensors_in(folder: pathlib.Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Returns type, shape and bytes of every tensor of a folder, in any file."""
    actual = {}
    for file in sorted(folder.glob("*.safetensors")):
        header, data = split(file)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            actual[name] = (entry["dtype"], entry["shape"], data[start:end])
    return actual

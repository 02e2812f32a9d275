"""The files that a conversion makes, down to the last byte, before it makes any."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from zaya_jax.config import Config, DataConfig, LoraConfig, ModelConfig
from zaya_jax.convert import companions as beside
from zaya_jax.convert.companions import Companions
from zaya_jax.convert.huggingface import config_to_huggingface
from zaya_jax.convert.layouts import ROUTER_BIAS, LayoutName, Tensor, WeightSlice, our_weights, tensors_of
from zaya_jax.convert.legacy import config_to_legacy
from zaya_jax.convert.pytorch_folder import CONFIG, INDEX, WEIGHTS
from zaya_jax.convert.run_folder import run_files
from zaya_jax.convert.safetensors_file import DTYPES, header, name_of
from zaya_jax.convert.stream import Block, PlannedFile, Source, execution_of, target_dtype
from zaya_jax.data import kept_tokenizer
from zaya_jax.data.tokenizer_files import TOKENIZER, as_json
from zaya_jax.model.zaya import SKIP_BIAS

MAX_SHARD_BYTES = 5 * 10**9
TargetLayout = Literal["native", "legacy", "zaya", "peft"]
"""What a conversion can make; "peft" is adapters alone."""


def pytorch_files(
    source: Source,
    layout: LayoutName,
    companions: Companions,
    *,
    dtype: np.dtype | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[PlannedFile]:
    """A PyTorch folder: safetensors shards and their index, config.json, what goes along, a card.

    Raises:
      ValueError: if the layout does not model the network.
    """
    config = exported_config(source, layout)
    dtypes = target_dtypes(source, dtype)
    fields = config_to_huggingface(config) if layout == "native" else config_to_legacy(config)
    main = dtypes["embedding/table"]
    fields = {
        "architectures": ["ZayaForCausalLM"],
        "model_type": "zaya",
        "dtype": main.name,
        "use_cache": True,
        **fields,
        **companions.token_ids,
    }
    small = {
        CONFIG: as_json(fields),
        "README.md": beside.card(config, companions, dtype=main.name, layout=layout),
        **companions.files,
    }
    tensors = tensors_of(layout, config)
    shards = _split_into_shards(tensors, dtypes, max_shard_bytes)
    names = [WEIGHTS] if len(shards) == 1 else [
        f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)
    ]  # fmt: skip
    if len(shards) > 1:
        small[INDEX] = as_json(_index(dict(zip(names, shards, strict=True)), dtypes))
    files = [PlannedFile(name, content) for name, content in small.items()]
    return files + [_shard(name, shard, dtypes) for name, shard in zip(names, shards, strict=True)]


def run_folder_files(
    source: Source,
    companions: Companions,
    folder: pathlib.Path,
    *,
    dtype: np.dtype | None,
    run: Config | None,
    step: int,
) -> list[PlannedFile]:
    """A run folder that `zaya generate` uses at once, and that `train.init_from` starts from.

    Args:
      source: of the weights.
      companions: go into `tokenizer/`.
      folder: where it will be.
      dtype: of the weights; None as they are.
      run: whose weights they are; None makes up a run around the network.
      step: of the checkpoint.
    """
    if run is None:
        tokenizer = str((folder / kept_tokenizer.FOLDER / TOKENIZER).absolute())
        length = min(DataConfig.sequence_length, source.config.max_position_embeddings)
        data = DataConfig(tokenizer=tokenizer, source=None, sequence_length=length)
        run = Config(model=source.config, data=data, execution=execution_of(source))
    # Its adapters are in the weights that the source gives.
    run = dataclasses.replace(run, run_folder=str(folder), lora=LoraConfig())
    extra = {f"{kept_tokenizer.FOLDER}/{name}": content for name, content in companions.files.items()}
    return run_files(run, target_dtypes(source, dtype), step=step, extra=extra)


def target_dtypes(source: Source, asked: np.dtype | None) -> dict[str, np.dtype]:
    """The type of each weight in what is made."""
    return {path: target_dtype(path, source.dtype(path), asked) for path in our_weights(source.config)}


def exported_config(source: Source, layout: LayoutName) -> ModelConfig:
    """The network as the layout sees it: where no token can choose the skip class, what it does is moot."""
    config = source.config
    wanted = "zero" if layout == "native" else config.skip_class
    if config.skip_class == wanted:
        return config
    layer = first_reachable_skip(source)
    if layer is not None:
        raise ValueError(
            f'model.skip_class is "{config.skip_class}"; Hugging Face models "zero" only, and in layer '
            f"{layer} a token can choose that class: its balancing bias is not 1 below the largest"
        )
    return dataclasses.replace(config, skip_class=wanted)


def read_router_bias(source: Source, layer: int) -> np.ndarray:
    """The balancing biases of a layer, float32 [X]."""
    weight_slice = WeightSlice(ROUTER_BIAS, (layer,), (source.config.num_router_classes,), True)
    return np.asarray(source.read(weight_slice), np.float32)


def notes(source: Source, layout: TargetLayout) -> list[str]:
    """What whoever loads the layout with other code should know of these weights."""
    if layout == "peft":
        return [
            "the routers' balancing biases are not among adapters: of a run that moves them take weights "
            "with their changes, or train with --config.balancing.learning_rate=0"
        ]
    layers = range(source.config.num_hidden_layers)
    skip_biases = {float(read_router_bias(source, layer)[-1]) for layer in layers}
    if layout == "native" and skip_biases != {SKIP_BIAS}:
        return [
            f"the skip class's balancing bias is not {SKIP_BIAS} everywhere; transformers (5.23) makes it so "
            "when it loads the weights, whatever the file says"
        ]
    layer = first_reachable_skip(source)
    if layout == "legacy" and source.config.skip_class == "zero" and layer is not None:
        return [
            f"in layer {layer} a token can choose the skip class; it gets nothing here, and its own input in "
            "the code that the legacy layout is for"
        ]
    return []


def first_reachable_skip(source: Source) -> int | None:
    """The first layer where a token could choose the skip class; None where none can.

    A class wins by probability plus bias, and probabilities differ by less than 1. In the released
    weights the skip class's bias is 1 below another everywhere ([Weights]).
    """
    for layer in range(source.config.num_hidden_layers):
        bias_X = read_router_bias(source, layer)
        if bias_X[-1] + 1 > bias_X[:-1].max():
            return layer
    return None


def _split_into_shards(
    tensors: list[Tensor], dtypes: Mapping[str, np.dtype], max_shard_bytes: int
) -> list[list[Tensor]]:
    """Tensors in order, into shards of at most that size; one that is larger has its own."""
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; it must be at least 1")
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = _size(tensor, dtypes)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards


def _size(tensor: Tensor, dtypes: Mapping[str, np.dtype]) -> int:
    return math.prod(tensor.shape) * dtypes[tensor.path].itemsize


def _index(shards: Mapping[str, list[Tensor]], dtypes: Mapping[str, np.dtype]) -> dict[str, Any]:
    everything = [tensor for shard in shards.values() for tensor in shard]
    return {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.shape) for tensor in everything),
            "total_size": sum(_size(tensor, dtypes) for tensor in everything),
        },
        "weight_map": {tensor.name: name for name, shard in shards.items() for tensor in shard},
    }


def _shard(name: str, tensors: list[Tensor], dtypes: Mapping[str, np.dtype]) -> PlannedFile:
    begin = header([(tensor.name, name_of(dtypes[tensor.path]), tensor.shape) for tensor in tensors])
    blocks = tuple(
        Block(weight_slice, dtypes[tensor.path], tensor.layout.to_theirs)
        for tensor in tensors
        for weight_slice in tensor.slices
    )
    return PlannedFile(name, begin, blocks)


def parse_dtype(name: str | None) -> np.dtype | None:
    """A type of weights by its name; None as they are.

    Raises:
      ValueError: for another type.
    """
    known = {dtype.name: dtype for dtype in DTYPES.values()}
    if name is not None and name not in known:
        raise ValueError(f'dtype is "{name}"; it must be {", ".join(known)}')
    return known[name] if name is not None else None

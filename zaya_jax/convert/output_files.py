"""Plans of the files that a conversion writes; sizes and positions of all bytes are known in advance."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from zaya_jax.config import Config, DataConfig, LoraConfig, ModelConfig
from zaya_jax.convert.card_facts import ORIGIN, origin_of
from zaya_jax.convert.companion_files import Companions
from zaya_jax.convert.model_card import CARD, model_card
from zaya_jax.convert.pytorch.folder import CONFIG, INDEX, WEIGHTS
from zaya_jax.convert.pytorch.huggingface import config_to_huggingface
from zaya_jax.convert.pytorch.layouts import (
    ROUTER_BIAS,
    LayoutName,
    Tensor,
    WeightSlice,
    our_weights,
    tensors_of,
)
from zaya_jax.convert.pytorch.legacy import config_to_legacy
from zaya_jax.convert.pytorch.safetensors_file import DTYPES, header, name_of
from zaya_jax.convert.quantized.export import OutputTensor, Quantization, quantized_tensors
from zaya_jax.convert.run_weights import run_files
from zaya_jax.convert.stream import Block, PlannedFile, Source, execution_of, target_dtype
from zaya_jax.data.tokenizers.tokenizer_files import TOKENIZER, as_json
from zaya_jax.errors import UserError
from zaya_jax.model.zaya import SKIP_BIAS
from zaya_jax.run_folder.names import TOKENIZER_FOLDER

MAX_SHARD_BYTES = 5 * 10**9
TargetLayout = Literal["native", "legacy", "zaya", "peft"]
"""Output of a conversion; "zaya" is a run folder, "peft" only the adapters."""


def pytorch_files(
    source: Source,
    layout: LayoutName,
    companions: Companions,
    *,
    dtype: np.dtype | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    quantization: Quantization | None = None,
) -> list[PlannedFile]:
    """Plans a PyTorch folder: safetensors shards and their index, config.json, companions and model card.

    Raises:
      UserError: if the layout or the quantized format does not support the architecture.
    """
    config = exported_config(source, layout)
    if quantization is not None:
        quantization.check(config)
    dtypes = target_dtypes(source, dtype)
    fields = config_to_huggingface(config) if layout == "native" else config_to_legacy(config)
    # All weights but router biases have the same type, that of the embedding.
    main = dtypes["embedding/table"]
    fields = {
        # The fields that transformers needs to select the model class.
        "architectures": ["ZayaForCausalLM"],
        "model_type": "zaya",
        "dtype": main.name,
        "use_cache": True,
        **fields,
        **companions.token_ids,
        **(quantization.config_fields() if quantization is not None else {}),
    }
    facts, story = companions.facts, companions.story
    small = {
        CONFIG: as_json(fields),
        CARD: model_card(config, facts, story, dtype=main.name, layout=layout, quantization=quantization),
        **companions.files,
    }
    tensors = _output_tensors(tensors_of(layout, config), dtypes, quantization)
    shards = _split_into_shards(tensors, max_shard_bytes)
    # The names that transformers uses for one file and for shards.
    names = [WEIGHTS] if len(shards) == 1 else [
        f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)
    ]  # fmt: skip
    # transformers needs an index only for shards.
    if len(shards) > 1:
        small[INDEX] = as_json(_index(dict(zip(names, shards, strict=True))))
    files = [PlannedFile(name, content) for name, content in small.items()]
    return files + [_shard(name, shard) for name, shard in zip(names, shards, strict=True)]


def run_folder_files(
    source: Source,
    companions: Companions,
    folder: pathlib.Path,
    *,
    dtype: np.dtype | None,
    run: Config | None,
    step: int,
) -> list[PlannedFile]:
    """Plans a run folder, for `zaya generate` and for `train.init_from`.

    Args:
      source: the weights.
      companions: tokenizer files and token ids, for the folder `tokenizer/`.
      folder: path of the run folder.
      dtype: type of the weights; None keeps their types.
      run: config of the run that the weights come from; None creates a config around the architecture.
      step: step of the checkpoint.
    """
    # The config of a run is required for a run folder; weights from PyTorch have none.
    if run is None:
        tokenizer = str((folder / TOKENIZER_FOLDER / TOKENIZER).absolute())
        # The default length may exceed what the model supports.
        length = min(DataConfig.sequence_length, source.config.max_position_embeddings)
        data = DataConfig(tokenizer=tokenizer, source=None, sequence_length=length)
        run = Config(model=source.config, data=data, execution=execution_of(source))
    # The source has merged the adapters into the weights, so the new run has none.
    run = dataclasses.replace(run, run_folder=str(folder), lora=LoraConfig())
    extra = {f"{TOKENIZER_FOLDER}/{name}": content for name, content in companions.files.items()}
    # Model cards of the runs that start from these weights name them, and their license.
    if origin := origin_of(companions.facts):
        extra[ORIGIN] = as_json(origin)
    return run_files(run, target_dtypes(source, dtype), step=step, extra=extra)


def target_dtypes(source: Source, dtype: np.dtype | None) -> dict[str, np.dtype]:
    """Type of each weight in the output, by path."""
    return {path: target_dtype(path, source.dtype(path), dtype) for path in our_weights(source.config)}


def exported_config(source: Source, layout: LayoutName) -> ModelConfig:
    """The config to export. `skip_class` may differ from the source if no token can select that class."""
    config = source.config
    skip_class = "zero" if layout == "native" else config.skip_class
    if config.skip_class == skip_class:
        return config
    layer = first_reachable_skip(source)
    if layer is not None:
        raise UserError(
            f'model.skip_class is "{config.skip_class}"; Hugging Face supports only "zero", and in '
            f"layer {layer} tokens can select that class, because its router bias is not 1 below the largest"
        )
    return dataclasses.replace(config, skip_class=skip_class)


def read_router_bias(source: Source, layer: int) -> np.ndarray:
    """The router biases of a layer, float32, shape [X]."""
    weight_slice = WeightSlice(ROUTER_BIAS, (layer,), (source.config.num_router_classes,), True)
    return np.asarray(source.read(weight_slice), np.float32)


def notes(source: Source, layout: TargetLayout) -> list[str]:
    """Notes about loading the output with other code."""
    if layout == "peft":
        return [
            "adapters do not include the router biases; if the run has changed them, convert the merged "
            "weights instead, or train with --config.balancing.learning_rate=0"
        ]
    # Reads one row of biases per layer, which is cheap.
    layers = range(source.config.num_hidden_layers)
    skip_biases = {float(read_router_bias(source, layer)[-1]) for layer in layers}
    if layout == "native" and skip_biases != {SKIP_BIAS}:
        return [
            f"the router bias of the skip class is not {SKIP_BIAS} in all layers; transformers (5.23) "
            "resets it to that value when it loads the weights"
        ]
    layer = first_reachable_skip(source)
    if layout == "legacy" and source.config.skip_class == "zero" and layer is not None:
        return [
            f"in layer {layer} tokens can select the skip class; its output is zero here, and the token's "
            "input in the code that reads the legacy layout"
        ]
    return []


def first_reachable_skip(source: Source) -> int | None:
    """The first layer in which a token could select the skip class; None if there is none.

    The router selects the class with the largest sum of probability and bias, and probabilities differ by
    less than 1. In the released weights the bias of the skip class is 1 below another one in all layers
    ([Weights]).
    """
    for layer in range(source.config.num_hidden_layers):
        bias_X = read_router_bias(source, layer)
        # Probabilities are at most 1, so a gap of 1 cannot be overcome.
        if bias_X[-1] + 1 > bias_X[:-1].max():
            return layer
    return None


def _output_tensors(
    tensors: list[Tensor], dtypes: Mapping[str, np.dtype], quantization: Quantization | None
) -> list[OutputTensor]:
    outputs: list[OutputTensor] = []
    for tensor in tensors:
        codec = None if quantization is None else quantization.codec_of(tensor.path)
        if quantization is not None and codec is not None:
            outputs += quantized_tensors(tensor, codec, quantization.expert_tensors)
            continue
        dtype = dtypes[tensor.path]
        blocks = tuple(Block(each, dtype, tensor.layout.to_theirs) for each in tensor.slices)
        outputs.append(OutputTensor(tensor.name, name_of(dtype), tensor.shape, blocks))
    return outputs


def _split_into_shards(tensors: list[OutputTensor], max_shard_bytes: int) -> list[list[OutputTensor]]:
    """Splits tensors into shards of at most a given size; a larger tensor has its own shard."""
    if max_shard_bytes < 1:
        raise UserError(f"max_shard_bytes is {max_shard_bytes}; it must be at least 1")
    shards: list[list[OutputTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        # A shard is never empty, even if a single tensor exceeds the limit.
        if shards[-1] and filled + tensor.size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.size
    return shards


def _index(shards: Mapping[str, list[OutputTensor]]) -> dict[str, Any]:
    everything = [tensor for shard in shards.values() for tensor in shard]
    return {
        "metadata": {
            "total_parameters": sum(block.num_values for tensor in everything for block in tensor.blocks),
            "total_size": sum(tensor.size for tensor in everything),
        },
        "weight_map": {tensor.name: name for name, shard in shards.items() for tensor in shard},
    }


def _shard(name: str, tensors: list[OutputTensor]) -> PlannedFile:
    begin = header([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors])
    return PlannedFile(name, begin, tuple(block for tensor in tensors for block in tensor.blocks))


def parse_dtype(name: str | None) -> np.dtype | None:
    """The type with a given name; None stays None, which keeps the types of the weights.

    Raises:
      UserError: for an unsupported type.
    """
    # The types of safetensors that the checkpoints support as well.
    known = {dtype.name: dtype for dtype in DTYPES.values()}
    if name is not None and name not in known:
        raise UserError(f'dtype is "{name}"; it must be {", ".join(known)}')
    return known[name] if name is not None else None

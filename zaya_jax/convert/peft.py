"""Export of a run's adapters in the format of Hugging Face's PEFT, without the adapted weights.

`adapter_model.safetensors` has two tensors per adapted matrix, named after the transformers module of the
matrix: `base_model.model.MODULE.lora_A.weight` [rank, inputs] and `.lora_B.weight` [outputs, rank] ([PEFT]).
PEFT adds `lora_alpha / r * B A`, which is our update transposed, like all matrices of torch.
"""

import dataclasses
import functools
import math

import numpy as np

from zaya_jax.convert.companion_files import Companions, as_json
from zaya_jax.convert.model_card import CARD, adapter_card
from zaya_jax.convert.pytorch.layouts import NATIVE, WeightSlice
from zaya_jax.convert.pytorch.safetensors_file import header, name_of
from zaya_jax.convert.run_weights import RunWeights
from zaya_jax.convert.stream import Block, PlannedFile, Source
from zaya_jax.errors import UserError
from zaya_jax.model.weight_declaration import Weight

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
EXPERTS = "layers/experts/"


@dataclasses.dataclass(frozen=True)
class _Factor:
    """A tensor of the PEFT file: a factor of one matrix of one layer."""

    name: str
    shape: tuple[int, int]
    block: Block


def adapter_files(source: Source, companions: Companions, *, dtype: np.dtype | None) -> list[PlannedFile]:
    """Plans the two files of a PEFT adapter, and its model card.

    Raises:
      UserError: if the source has no adapters, or adapters of experts, which PEFT does not support.
    """
    # PyTorch folders have adapters merged or in separate PEFT folders.
    if not isinstance(source, RunWeights):
        raise UserError("--adapters-only needs a run that trained adapters; SRC is a PyTorch folder")
    run, adapters = source.run, source.adapters
    if not adapters:
        raise UserError(f"--adapters-only: {run.run_folder} has no adapters, because its lora.rank is 0")
    # Both factors of a matrix have the same target.
    targets = {factor.adapts.path for factor in adapters.values() if factor.adapts is not None}
    experts = sorted(path for path in targets if path.startswith(EXPERTS))
    if experts:
        raise UserError(
            f"--adapters-only: {experts[0]} has an adapter, but PEFT does not support matrices of experts; "
            "remove the option to export the merged weights"
        )
    factors = [
        _factor(source, path, factor, layer, dtype)
        for layer in range(run.model.num_hidden_layers)
        for path, factor in adapters.items()
    ]
    begin = header([(each.name, name_of(each.block.dtype), each.shape) for each in factors])
    return [
        PlannedFile(CONFIG, as_json(_config(source, targets))),
        PlannedFile(CARD, adapter_card(companions.facts, companions.story)),
        PlannedFile(WEIGHTS, begin, tuple(each.block for each in factors)),
    ]


def _config(source: RunWeights, targets: set[str]) -> dict[str, object]:
    # PEFT matches target_modules by the end of a module name, so the layer is removed.
    modules = {_module(path, "{layer}").partition("{layer}.")[2] for path in targets}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source.run.train.init_from,
        "r": source.run.lora.rank,
        "lora_alpha": source.run.lora.alpha,
        # Dropout is not implemented here, and irrelevant for inference.
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _module(path: str, layer: int | str) -> str:
    """Name of the transformers module that contains one of our matrices."""
    return NATIVE[path].name.format(layer=layer).removesuffix(".weight")


def _factor(source: RunWeights, path: str, factor: Weight, layer: int, dtype: np.dtype | None) -> _Factor:
    assert factor.adapts is not None, "all of a run's adapters are"
    # Factor A has the rank as its last axis, B as its first one after the layers.
    is_a, rank = path.endswith("/a"), source.run.lora.rank
    other = math.prod(factor.shape[1:]) // rank
    return _Factor(
        name=f"{PREFIX}{_module(factor.adapts.path, layer)}.lora_{'A' if is_a else 'B'}.weight",
        shape=(rank, other) if is_a else (other, rank),
        block=Block(
            WeightSlice(path, (layer,), factor.shape[1:], True),
            source.dtype(path) if dtype is None else dtype,
            # torch stores linear weights transposed, [outputs, inputs].
            functools.partial(np.moveaxis, source=-1, destination=0)
            if is_a
            else functools.partial(np.moveaxis, source=0, destination=-1),
        ),
    )

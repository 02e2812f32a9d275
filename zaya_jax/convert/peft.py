"""The adapters of a run as Hugging Face's PEFT stores them, without the weights that they change.

`adapter_model.safetensors` has two tensors for each matrix, named by the module of transformers' that
holds it: `base_model.model.MODULE.lora_A.weight` [rank, inputs] and `.lora_B.weight` [outputs, rank]
([PEFT]). PEFT adds `lora_alpha / r * B A`, which is our change transposed, as all their matrices are.
"""

import dataclasses
import functools
import math

import numpy as np

from zaya_jax.convert.companions import as_json
from zaya_jax.convert.layouts import NATIVE, WeightSlice
from zaya_jax.convert.run_folder import RunWeights
from zaya_jax.convert.safetensors_file import header, name_of
from zaya_jax.convert.stream import Block, PlannedFile, Source
from zaya_jax.model.weight import Weight

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
EXPERTS = "layers/experts/"


@dataclasses.dataclass(frozen=True)
class _Factor:
    """A tensor of PEFT's: one layer's factor of one matrix."""

    name: str
    shape: tuple[int, int]
    block: Block


def adapter_files(source: Source, *, dtype: np.dtype | None) -> list[PlannedFile]:
    """The two files of a PEFT adapter.

    Raises:
      ValueError: if the run has no adapters, or one of experts, for which PEFT has no module.
    """
    if not isinstance(source, RunWeights):
        raise ValueError("--adapters-only: the weights are PyTorch's; it takes a run that trained adapters")
    run, adapters = source.run, source.adapters
    if not adapters:
        raise ValueError(f"--adapters-only: {run.run_folder} has no adapters: its lora.rank is 0")
    targets = {factor.adapts.path for factor in adapters.values() if factor.adapts is not None}
    experts = sorted(path for path in targets if path.startswith(EXPERTS))
    if experts:
        raise ValueError(
            f"--adapters-only: {experts[0]} has an adapter, and PEFT has no module for matrices of experts; "
            "leave the option out, for weights with their changes"
        )
    factors = [
        _factor(source, path, factor, layer, dtype)
        for layer in range(run.model.num_hidden_layers)
        for path, factor in adapters.items()
    ]
    begin = header([(each.name, name_of(each.block.dtype), each.shape) for each in factors])
    return [
        PlannedFile(CONFIG, as_json(_config(source, targets))),
        PlannedFile(WEIGHTS, begin, tuple(each.block for each in factors)),
    ]


def _config(source: RunWeights, targets: set[str]) -> dict[str, object]:
    modules = {_module(path, "{layer}").partition("{layer}.")[2] for path in targets}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source.run.train.init_from,
        "r": source.run.lora.rank,
        "lora_alpha": source.run.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _module(path: str, layer: int | str) -> str:
    """What transformers calls the module with a matrix of ours."""
    return NATIVE[path].name.format(layer=layer).removesuffix(".weight")


def _factor(source: RunWeights, path: str, factor: Weight, layer: int, dtype: np.dtype | None) -> _Factor:
    assert factor.adapts is not None, "all of a run's adapters are"
    is_a, rank = path.endswith("/a"), source.run.lora.rank
    other = math.prod(factor.shape[1:]) // rank
    return _Factor(
        name=f"{PREFIX}{_module(factor.adapts.path, layer)}.lora_{'A' if is_a else 'B'}.weight",
        shape=(rank, other) if is_a else (other, rank),
        block=Block(
            WeightSlice(path, (layer,), factor.shape[1:], True),
            source.dtype(path) if dtype is None else dtype,
            # Torch multiplies with a matrix's transpose.
            functools.partial(np.moveaxis, source=-1, destination=0)
            if is_a
            else functools.partial(np.moveaxis, source=0, destination=-1),
        ),
    )

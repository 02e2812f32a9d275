"""Adapters in the format of Hugging Face's PEFT: export of a run's, merging into weights, combination.

`adapter_model.safetensors` has two tensors per adapted matrix, named after the module of the matrix in one of
the layouts: `base_model.model.MODULE.lora_A.weight` [rank, inputs] and `.lora_B.weight` [outputs, rank], and
with DoRA the norms of the outputs, `.lora_magnitude_vector` [outputs] ([PEFT]). PEFT adds
`lora_alpha / r * B A`, or with rsLoRA `lora_alpha / sqrt(r) * B A`, which is our update transposed, like all
matrices of torch.

Letters: R rank, C inputs, O outputs.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from zaya_jax.config import ModelConfig
from zaya_jax.convert.companion_files import as_json
from zaya_jax.convert.pytorch.layouts import LAYOUTS, LayoutName, Tensor, WeightSlice, tensors_of
from zaya_jax.convert.pytorch.safetensors_file import DTYPES, header, name_of, read_bytes, read_header
from zaya_jax.convert.run_weights import RunWeights
from zaya_jax.convert.stream import PlannedFile, Source
from zaya_jax.errors import UserError
from zaya_jax.files.json_files import read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
EXPERTS = "layers/experts/"
Combination = Literal["cat", "linear"]
_SUFFIXES = {".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_magnitude_vector": "magnitude"}
_UNSUPPORTED = (
    "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out", "layer_replication", "lora_bias",
    "target_parameters", "trainable_token_indices", "exclude_modules", "alora_invocation_tokens",
)  # fmt: skip
"""Fields of an adapter's config that must be empty: they change what its tensors mean."""


@dataclasses.dataclass(frozen=True)
class PeftAdapter:
    """An adapter in memory.

    Attributes:
      parts: by module, "a" [R, C], "b" [O, R], and with DoRA "magnitude" [O].
      rank: largest rank.
      alpha: `lora_alpha` of the config.
      rslora: whether the scale is alpha / sqrt(rank) instead of alpha / rank.
      base_model: name or path of the model that is adapted; None if unknown.
    """

    parts: dict[str, dict[str, np.ndarray]]
    rank: int
    alpha: float
    rslora: bool
    base_model: str | None

    @property
    def scale(self) -> float:
        """Factor of the product B A that is added to a weight."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def dora(self) -> bool:
        """Whether norms of outputs are a part of the adapter."""
        return any("magnitude" in parts for parts in self.parts.values())

    def files(self, dtype: np.dtype | None) -> list[PlannedFile]:
        """Plans the two files of the adapter; a dtype of None keeps the types of its tensors."""
        suffixes = {name: suffix for suffix, name in _SUFFIXES.items()}
        tensors = {
            f"{PREFIX}{module}{suffixes[name]}": np.ascontiguousarray(x if dtype is None else x.astype(dtype))
            for module, parts in self.parts.items()
            for name, x in parts.items()
        }
        begin = header([(name, name_of(x.dtype), x.shape) for name, x in tensors.items()])
        content = begin + b"".join(x.tobytes() for x in tensors.values())
        return [PlannedFile(CONFIG, as_json(self._config())), PlannedFile(WEIGHTS, content)]

    def _config(self) -> dict[str, object]:
        # PEFT matches target_modules by the end of a module name, so the layer is removed.
        modules = {module.split(".", 3)[3] for module in self.parts}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.rslora,
            "use_dora": self.dora,
            # Dropout is not implemented here, and irrelevant for inference.
            "lora_dropout": 0.0,
            "target_modules": sorted(modules),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }


def adapter_of_run(source: Source, layout: LayoutName, base_model: str | None) -> PeftAdapter:
    """Reads the adapters of a run.

    Args:
      source: weights of the run.
      layout: layout whose modules the adapter names.
      base_model: name of the adapted model; None for the folder that the run started from.

    Raises:
      UserError: if the source has no adapters, or adapters of experts, which PEFT does not support.
    """
    # PyTorch folders have adapters merged or in separate PEFT folders.
    if not isinstance(source, RunWeights):
        raise UserError("--adapters-only needs a run that trained adapters; SRC is a PyTorch folder")
    run = source.run
    if not source.adapters:
        raise UserError(f"--adapters-only: {run.run_folder} has no adapters, because its lora.rank is 0")
    targets = {factor.adapts.path: factor for factor in source.adapters.values() if factor.adapts}
    experts = sorted(path for path in targets if path.startswith(EXPERTS))
    if experts:
        raise UserError(
            f"--adapters-only: {experts[0]} has an adapter, but PEFT does not support matrices of experts; "
            "remove the option to export the merged weights"
        )
    parts = {
        module: _parts_of_run(source, tensor)
        for module, tensor in _modules(run.model, (layout,)).items()
        if tensor.path in targets
    }
    return PeftAdapter(
        parts, run.lora.rank, run.lora.alpha, run.lora.rslora, base_model or run.train.init_from
    )


def _parts_of_run(source: RunWeights, tensor: Tensor) -> dict[str, np.ndarray]:
    (weight_slice,) = tensor.slices
    prefix = f"adapters/{tensor.path.removeprefix('layers/')}/"
    shapes = {path: weight.shape for path, weight in source.adapters.items() if path.startswith(prefix)}
    parts = {
        path.removeprefix(prefix): source.read(WeightSlice(path, weight_slice.start, shape[1:], True))
        for path, shape in shapes.items()
    }
    # torch stores linear weights transposed, [outputs, inputs]. A has the rank as its last axis, B as its
    # first one.
    rank = source.run.lora.rank
    arrange = {"a": lambda x: x.reshape(-1, rank).T, "b": lambda x: x.reshape(rank, -1).T}
    return {name: arrange.get(name, np.ravel)(x) for name, x in parts.items()}


def _modules(config: ModelConfig, layouts: Sequence[LayoutName]) -> dict[str, Tensor]:
    """The tensor of each module with a matrix of a layer, by name of the module."""
    return {
        tensor.name.removesuffix(".weight"): tensor
        for layout in layouts
        for tensor in tensors_of(layout, config)
        if tensor.slices[0].is_stacked and len(tensor.shape) == 2
    }


def read_adapter(folder: str | pathlib.Path) -> PeftAdapter:
    """Reads a PEFT folder.

    Raises:
      UserError: if it is damaged, or has something else than LoRA's tensors.
    """
    folder = pathlib.Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}; give a folder that PEFT or zaya convert wrote")
    values = read_json(folder / CONFIG)
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if values.get("peft_type") != "LORA" or values.get("bias", "none") != "none":
        raise UserError(
            f"{folder / CONFIG} has peft_type {values.get('peft_type')} and bias {values.get('bias')}; only "
            '"LORA" without trained biases is supported'
        )
    for name in _UNSUPPORTED:
        if values.get(name):
            raise UserError(f"{folder / CONFIG} has {name} {values[name]}, which is not supported")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise UserError(
            f"{folder / CONFIG} has r {rank} and lora_alpha {alpha}; they must be numbers above 0"
        )
    parts: dict[str, dict[str, np.ndarray]] = {}
    # A tensor of another kind of adapter, such as of an embedding, must not be dropped in silence.
    for name, x in _tensors(folder / WEIGHTS).items():
        suffix = next((each for each in _SUFFIXES if name.endswith(each)), None)
        if suffix is None or not name.startswith(PREFIX):
            raise UserError(f"{folder / WEIGHTS} has {name}, which is no tensor of a LoRA adapter")
        parts.setdefault(name.removeprefix(PREFIX).removesuffix(suffix), {})[_SUFFIXES[suffix]] = x
    for module, own in parts.items():
        _check_parts(f"{folder / WEIGHTS}: {module}", own, rank, bool(values.get("use_dora")))
    return PeftAdapter(
        parts, rank, float(alpha), bool(values.get("use_rslora")), values.get("base_model_name_or_path")
    )


def _tensors(file: pathlib.Path) -> dict[str, np.ndarray]:
    # Read whole: an adapter is about a hundredth of its model.
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return {
            name: read_bytes(descriptor, each.offset, each.size)
            .view(_dtype(name, each.dtype))
            .reshape(each.shape)
            for name, each in read_header(file).items()
        }
    finally:
        os.close(descriptor)


def _dtype(name: str, stored: str) -> np.dtype:
    if stored not in DTYPES:
        raise UserError(f"tensor {name} has type {stored}; it must be one of {', '.join(DTYPES)}")
    return DTYPES[stored]


def _check_parts(where: str, parts: Mapping[str, np.ndarray], rank: int, dora: bool) -> None:
    # Shapes are compared with the base when the adapter is merged; only the rank is known here.
    expected = {"a", "b"} | ({"magnitude"} if dora else set())
    shapes = {name: x.shape for name, x in parts.items()}
    if parts.keys() != expected or shapes["a"][:1] != (rank,) or shapes["b"][1:] != (rank,):
        raise UserError(
            f"{where} has parts {shapes}; it must have {', '.join(sorted(expected))} of rank {rank}"
        )


class AdaptedWeights:
    """Weights with adapters merged, as a `zaya_jax.convert.stream.Source`."""

    def __init__(self, base: Source, adapters: Sequence[tuple[PeftAdapter, float]]):
        """Checks that adapters fit the weights.

        Args:
          base: the weights.
          adapters: adapters and their weights; the weighted updates of all are added.

        Raises:
          UserError: if a module is unknown or has another shape, or DoRA is combined.
        """
        # An adapter of either layout fits weights of either: their modules have different names.
        modules = _modules(base.config, tuple(LAYOUTS))
        _check_dora(adapters)
        self._base = base
        self._tensors: dict[str, Tensor] = {}
        self._updates: dict[tuple[str, int], list[tuple[dict[str, np.ndarray], float]]] = {}
        # Checked before any file is written: an unknown module is a mistake in the choice of the base.
        for adapter, weight in adapters:
            for module, parts in adapter.parts.items():
                tensor = modules.get(module)
                shape = (len(parts["b"]), parts["a"].shape[1])
                if tensor is None or tensor.shape != shape:
                    raise UserError(
                        f"the adapter changes {module} {list(shape)}, and the weights have "
                        f"{list(tensor.shape) if tensor else 'no such matrix'}; it belongs to another model"
                    )
                self._tensors[tensor.path] = tensor
                key = (tensor.path, tensor.slices[0].start[0])
                self._updates.setdefault(key, []).append((parts, weight * adapter.scale))

    @property
    def config(self) -> ModelConfig:
        """Architecture of the network whose weights these are."""
        return self._base.config

    def dtype(self, path: str) -> np.dtype:
        """Type of a weight, that of the weights before the merge."""
        return self._base.dtype(path)

    def read(self, weight_slice: WeightSlice) -> np.ndarray:
        """Reads a slice, with its adapters merged."""
        own = self._base.read(weight_slice)
        updates = self._updates.get((weight_slice.path, weight_slice.start[0]))
        if updates is None or not weight_slice.is_stacked:
            return own
        tensor = self._tensors[weight_slice.path]
        matrix_OC = tensor.layout.to_theirs(own).reshape(tensor.shape).astype(np.float32)
        for parts, scale in updates:
            matrix_OC = matrix_OC + np.float32(scale) * _product(parts)
            # `_check_dora` has ensured that no other update follows.
            if "magnitude" in parts:
                norms_O = np.linalg.norm(matrix_OC, axis=1)
                factors_O = parts["magnitude"].astype(np.float32) / np.where(norms_O > 0, norms_O, 1)
                matrix_OC = matrix_OC * factors_O[:, None]
        # Computed in float32 and rounded once.
        return tensor.layout.to_ours(np.ascontiguousarray(matrix_OC), weight_slice.shape).astype(own.dtype)

    def identity(self) -> list[Any]:
        """JSON-compatible values that change when the weights or the adapters do."""
        sums = [float(sum(np.abs(x.astype(np.float64)).sum() for x in parts.values())) * scale
                for updates in self._updates.values() for parts, scale in updates]  # fmt: skip
        return [*self._base.identity(), *sums]


def _product(parts: Mapping[str, np.ndarray]) -> np.ndarray:
    return parts["b"].astype(np.float32) @ parts["a"].astype(np.float32)


def _check_dora(adapters: Sequence[tuple[PeftAdapter, float]]) -> None:
    if any(adapter.dora for adapter, _ in adapters) and (len(adapters) > 1 or adapters[0][1] != 1):
        raise UserError(
            "an adapter with DoRA can only be merged alone and with weight 1: its norms do not add up"
        )


def combined(adapters: Sequence[tuple[PeftAdapter, float]], kind: Combination) -> PeftAdapter:
    """Combines adapters as PEFT's `add_weighted_adapter` does.

    Args:
      adapters: adapters and their weights.
      kind: "cat" concatenates factors, which adds the weighted updates exactly, and the ranks; "linear" adds
        factors of equal rank, with the square root of the weight on each, which is an approximation.

    Raises:
      UserError: if "linear" combines different ranks, or an adapter has DoRA.
    """
    if any(adapter.dora for adapter, _ in adapters):
        raise UserError("adapters with DoRA cannot be combined, because their norms do not add up")
    ranks = [adapter.rank for adapter, _ in adapters]
    if kind == "linear" and len(set(ranks)) > 1:
        raise UserError(f"--combine=linear needs adapters of equal rank, and they have {ranks}; use cat")
    rank = sum(ranks) if kind == "cat" else ranks[0]
    # In the order of the first adapter, so that the same command writes the same bytes.
    modules = dict.fromkeys(module for adapter, _ in adapters for module in adapter.parts)
    parts = {}
    for module in modules:
        own = [(a.parts[module], w * a.scale) for a, w in adapters if module in a.parts]
        parts[module] = _concatenated(own, rank) if kind == "cat" else _added(own)
    # The scale of the result is 1.
    return PeftAdapter(parts, rank, float(rank), False, adapters[0][0].base_model)


def _concatenated(own: list[tuple[dict[str, np.ndarray], float]], rank: int) -> dict[str, np.ndarray]:
    a_RC = np.concatenate([parts["a"].astype(np.float32) * np.float32(scale) for parts, scale in own])
    b_OR = np.concatenate([parts["b"].astype(np.float32) for parts, _ in own], axis=1)
    # A module that some adapters do not change has zeros for their ranks.
    missing = rank - len(a_RC)
    return {"a": np.pad(a_RC, ((0, missing), (0, 0))), "b": np.pad(b_OR, ((0, 0), (0, missing)))}


def _added(own: list[tuple[dict[str, np.ndarray], float]]) -> dict[str, np.ndarray]:
    # The sign is on one side only, where it does not cancel.
    roots = [math.sqrt(abs(scale)) for _, scale in own]
    signed = [math.copysign(root, scale) for root, (_, scale) in zip(roots, own, strict=True)]
    factors = {"a": signed, "b": roots}
    return {
        name: np.sum([f * parts[name].astype(np.float32) for f, (parts, _) in zip(each, own, strict=True)], 0)
        for name, each in factors.items()
    }

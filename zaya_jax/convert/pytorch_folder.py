"""A folder of PyTorch weights, of either layout: opened with suspicion, read slice by slice.

Which layout it is, its tensors and its config.json must agree on. Nothing here loads pickle.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from zaya_jax.config import ModelConfig
from zaya_jax.convert.huggingface import config_from_huggingface
from zaya_jax.convert.layouts import (
    EMBEDDING,
    TIED_HEAD,
    LayoutName,
    TensorLayout,
    WeightSlice,
    check_shapes,
    first_of,
    tensors_of,
)
from zaya_jax.convert.legacy import config_from_legacy, is_legacy_config
from zaya_jax.convert.safetensors_file import DTYPES, StoredTensor, read_bytes, read_header
from zaya_jax.json_files import read_json
from zaya_jax.model.weights import count_parameters

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
COMPARED_BYTES = 2**26
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_NATIVE_NAME = re.compile(r"\.(self_attn\.(qkv_proj|qk_norm)|mlp|\w+_layernorm|post_\w+_residual_scale)\.")
_LEGACY_NAME = re.compile(r"\.(self_attn\.qkv|zaya_block|input_norm|res_scale)\.")
QUANTISED_DTYPES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F4", "U8", "I8")
"""What FP8 and MXFP4 releases hold: values, packed values, and their scales."""


@dataclasses.dataclass(frozen=True)
class PytorchFolder:
    """A folder whose tensors are all there and of the right shape.

    Attributes:
      folder: where it is.
      layout: of its tensors.
      values: of its config.json.
      config: the network's.
      stored: where each tensor lies, by its name.
    """

    folder: pathlib.Path
    layout: LayoutName
    values: dict[str, Any]
    config: ModelConfig
    stored: dict[str, StoredTensor]


def open_folder(folder: str | pathlib.Path) -> PytorchFolder:
    """Opens a folder of PyTorch weights. Reads headers only, and the head where it has one of its own.

    Raises:
      ValueError: for anything that is missing, contradictory, damaged or not modelled.
    """
    folder = pathlib.Path(folder)
    stored = stored_tensors(folder)
    values = read_json(folder / CONFIG)
    layout = find_layout(folder, stored, values)
    if layout == "legacy":  # the 74B model's first files say smoe for zaya
        stored = {name.replace(".smoe_block.", ".zaya_block."): tensor for name, tensor in stored.items()}
    read_config = config_from_huggingface if layout == "native" else config_from_legacy
    try:
        config = read_config(values)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    _check_tensors(folder, layout, config, stored)
    return PytorchFolder(folder, layout, values, config, stored)


def stored_tensors(folder: pathlib.Path) -> dict[str, StoredTensor]:
    """The tensors of a folder's safetensors files, by name.

    Raises:
      ValueError: if there are none, or index and files contradict each other.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; it must hold {CONFIG} and safetensors files")
    if (folder / INDEX).exists():
        return _indexed_tensors(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
        if pickles:
            raise ValueError(
                f"{folder} has no safetensors file, only pickle ({first_of(pickles)}); loading pickle runs "
                "what is in it, and is not done here"
            )
        raise ValueError(f"{folder} has no safetensors file; {WEIGHTS}, or shards with {INDEX}, hold weights")
    if [file.name for file in files] != [WEIGHTS]:
        names = first_of([file.name for file in files])
        raise ValueError(f"{folder} has {names} and no {INDEX}, which must say what is in them")
    return read_header(files[0])


def _indexed_tensors(folder: pathlib.Path) -> dict[str, StoredTensor]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX} has no weight_map, which must name the file of each tensor")
    tensors: dict[str, StoredTensor] = {}
    for name in sorted({str(file) for file in weight_map.values()}):
        if name != pathlib.PurePath(name).name or name in ("", ".", "..") or "\\" in name:
            raise ValueError(
                f'{folder / INDEX} names the file "{name}"; it must be a file of the folder itself'
            )
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing; {INDEX} says that it holds tensors")
        found = read_header(folder / name)
        listed = {tensor for tensor, file in weight_map.items() if file == name}
        for which, what in ((listed - found.keys(), "lacks"), (found.keys() - listed, "has besides")):
            if which:
                raise ValueError(f"{folder / name} {what} {first_of(sorted(which))}, against {INDEX}")
        tensors |= found
    return tensors


def find_layout(
    folder: pathlib.Path, stored: Mapping[str, StoredTensor], values: Mapping[str, Any]
) -> LayoutName:
    """The layout that tensors and config.json agree on.

    Raises:
      ValueError: if they do not, or the weights are quantised, or not ZAYA's.
    """
    _refuse_quantised(folder, stored, values)
    native = sorted(name for name in stored if _NATIVE_NAME.search(name))
    legacy = sorted(name for name in stored if _LEGACY_NAME.search(name.replace("smoe_block", "zaya_block")))
    if native and legacy:
        raise ValueError(
            f"{folder} mixes two layouts: {len(native)} tensors have native names ({first_of(native[:2])}), "
            f"{len(legacy)} have legacy names ({first_of(legacy[:2])})"
        )
    if not native and not legacy:
        raise ValueError(
            f"{folder} holds no ZAYA1 weights: none of its {len(stored)} tensors has a name of either layout"
        )
    model_type = values.get("model_type", "zaya")
    if model_type != "zaya":
        raise ValueError(f'{folder / CONFIG} has model_type "{model_type}"; it must be "zaya"')
    by_tensors: LayoutName = "native" if native else "legacy"
    by_config: LayoutName = "legacy" if is_legacy_config(values) else "native"
    if by_tensors != by_config:
        raise ValueError(
            f"{folder} contradicts itself: its tensors have the {by_tensors} layout, its {CONFIG} has the "
            f"{by_config} one"
        )
    return by_tensors


def _refuse_quantised(
    folder: pathlib.Path, stored: Mapping[str, StoredTensor], values: Mapping[str, Any]
) -> None:
    method = values.get("quantization_config")
    if isinstance(method, Mapping):
        method = method.get("quant_method", "an unnamed method")
    odd = {name: tensor.dtype for name, tensor in stored.items() if tensor.dtype not in DTYPES}
    named = first_of([f"{name} ({dtype})" for name, dtype in sorted(odd.items())])
    if method is not None or any(dtype in QUANTISED_DTYPES for dtype in odd.values()):
        by = f" by {method}" if method is not None else f": {named}"
        raise ValueError(
            f"{folder} is quantised{by}; its weights cannot be read back exactly, so take the bfloat16 "
            "release that it was made from"
        )
    if odd:
        raise ValueError(
            f"{folder} has tensors of a type that weights cannot have here: {named}; known are "
            f"{', '.join(DTYPES)}"
        )


def _check_tensors(
    folder: pathlib.Path, layout: LayoutName, config: ModelConfig, stored: Mapping[str, StoredTensor]
) -> None:
    num_values = sum(tensor.size // DTYPES[tensor.dtype].itemsize for tensor in stored.values())
    if count_parameters(config) > 100 * num_values:  # a list of what is missing would be endless
        raise ValueError(
            f"{folder / CONFIG} describes {count_parameters(config):,} parameters; the files hold "
            f"{num_values:,}"
        )
    expected = {tensor.name: tensor.shape for tensor in tensors_of(layout, config)}
    if TIED_HEAD in stored:
        expected[TIED_HEAD] = expected[EMBEDDING]
    try:
        check_shapes({name: tensor.shape for name, tensor in stored.items()}, expected, "tensor")
    except ValueError as error:
        raise ValueError(f"{folder} does not hold what its {CONFIG} describes: {error}") from error
    if TIED_HEAD in stored and not _are_equal(stored[TIED_HEAD], stored[EMBEDDING]):
        raise ValueError(f"{folder}: {TIED_HEAD} differs from {EMBEDDING}; only a tied head is modelled")


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.size) != (other.dtype, other.size):
        return False
    with _opened({one.file, other.file}) as files:
        for start in range(0, one.size, COMPARED_BYTES):
            size = min(COMPARED_BYTES, one.size - start)
            parts = [read_bytes(files[tensor.file], tensor.offset + start, size) for tensor in (one, other)]
            if not np.array_equal(parts[0], parts[1]):
                return False
    return True


@contextlib.contextmanager
def _opened(files: set[pathlib.Path]) -> Iterator[dict[pathlib.Path, int]]:
    """Descriptors of files, for reading at any place from any thread."""
    with contextlib.ExitStack() as stack:
        descriptors = {}
        for file in sorted(files):
            descriptors[file] = os.open(file, os.O_RDONLY)
            stack.callback(os.close, descriptors[file])
        yield descriptors


class PytorchWeights:
    """The weights of a folder as a `zaya_jax.convert.stream.Source`. Use it as a context."""

    def __init__(self, folder: PytorchFolder):
        self.config = folder.config
        self._places: dict[WeightSlice, tuple[StoredTensor, int, TensorLayout]] = {}
        self._dtypes: dict[str, set[np.dtype]] = {}
        for tensor in tensors_of(folder.layout, folder.config):
            stored = folder.stored[tensor.name]
            dtype = DTYPES[stored.dtype]
            self._dtypes.setdefault(tensor.path, set()).add(dtype)
            offset = stored.offset
            for weight_slice in tensor.slices:
                self._places[weight_slice] = (stored, offset, tensor.layout)
                offset += weight_slice.size * dtype.itemsize
        self._files = _opened({tensor.file for tensor in folder.stored.values()})

    def __enter__(self) -> "PytorchWeights":
        self._descriptors = self._files.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._files.__exit__(*exception)

    def dtype(self, path: str) -> np.dtype:
        """The type of a weight; float32 where its tensors have several, which holds them all."""
        dtypes = self._dtypes[path]
        return next(iter(dtypes)) if len(dtypes) == 1 else np.dtype(np.float32)

    def read(self, weight_slice: WeightSlice) -> np.ndarray:
        """A slice with its axes in our order; a view of what was read."""
        stored, offset, layout = self._places[weight_slice]
        dtype = DTYPES[stored.dtype]
        raw = read_bytes(self._descriptors[stored.file], offset, weight_slice.size * dtype.itemsize)
        return layout.to_ours(raw.view(dtype), weight_slice.shape)

    def identity(self) -> list[Any]:
        """What changes when the files do."""
        files = sorted({stored.file for stored, _, _ in self._places.values()})
        return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]

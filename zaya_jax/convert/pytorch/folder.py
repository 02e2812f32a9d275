"""A folder of PyTorch weights in either layout: validated when it is opened, read slice by slice.

The layout is detected from the tensors and from config.json, which must agree. Pickle files are never loaded.
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
from zaya_jax.convert.pytorch.huggingface import config_from_huggingface
from zaya_jax.convert.pytorch.layouts import (
    EMBEDDING,
    TIED_HEAD,
    LayoutName,
    Tensor,
    TensorLayout,
    WeightSlice,
    check_shapes,
    first_of,
    tensors_of,
)
from zaya_jax.convert.pytorch.legacy import config_from_legacy, is_legacy_config
from zaya_jax.convert.pytorch.network_fields import unread_fields
from zaya_jax.convert.pytorch.safetensors_file import (
    DTYPES,
    StoredTensor,
    num_values,
    read_bytes,
    read_header,
)
from zaya_jax.convert.quantized.codecs import QuantizedValues
from zaya_jax.convert.quantized.schemes import FIELDS as QUANTIZATION_FIELDS
from zaya_jax.convert.quantized.schemes import Scheme, quantization_section, read_schemes
from zaya_jax.convert.quantized.tensors import QuantizedTensor, find_quantized
from zaya_jax.data.tokenizers.tokenizer_files import FILES
from zaya_jax.errors import UserError
from zaya_jax.files.hub import fetch
from zaya_jax.files.json_files import read_json
from zaya_jax.files.untrusted_folder import check_regular
from zaya_jax.model.weights import count_parameters

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
COMPARED_BYTES = 2**26
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_NATIVE_NAME = re.compile(r"\.(self_attn\.(qkv_proj|qk_norm)|mlp|\w+_layernorm|post_\w+_residual_scale)\.")
_LEGACY_NAME = re.compile(r"\.(self_attn\.qkv|zaya_block|input_norm|res_scale)\.")
QUANTIZED_DTYPES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F4", "U8", "I8")
"""Types of values, packed values and scales in quantized releases."""


@dataclasses.dataclass(frozen=True)
class PytorchFolder:
    """A folder with all tensors of a model, in the right shapes.

    Attributes:
      folder: path of the folder.
      layout: layout of the tensors.
      values: fields of config.json.
      config: architecture that config.json describes.
      stored: position of each tensor in the files, by name.
      quantized: tensors of the layout with quantized weights, by name.
      unread: ignored fields of config.json, as "name = value".
      revision: "ID at revision COMMIT" of a model from the hub; None for other folders.
    """

    folder: pathlib.Path
    layout: LayoutName
    values: dict[str, Any]
    config: ModelConfig
    stored: dict[str, StoredTensor]
    quantized: dict[str, QuantizedTensor] = dataclasses.field(default_factory=dict)
    unread: tuple[str, ...] = ()
    revision: str | None = None


def open_folder(folder: str | pathlib.Path) -> PytorchFolder:
    """Opens and validates a folder of PyTorch weights. Reads only headers, and a tied head if stored.

    Args:
      folder: path of the folder, or the id of a model on the Hugging Face hub, which is downloaded.

    Raises:
      UserError: if the folder is incomplete, inconsistent, damaged or not supported.
    """
    # Returns None for a path of this machine, which has precedence over a hub id.
    fetched = fetch(str(folder), "model")
    folder = fetched.folder if fetched is not None else pathlib.Path(folder)
    stored = stored_tensors(folder)
    values = read_json(folder / CONFIG)
    layout = find_layout(folder, stored, values)
    if layout == "legacy":  # the first files of the 74B model use "smoe" for "zaya"
        stored = {name.replace(".smoe_block.", ".zaya_block."): tensor for name, tensor in stored.items()}
    # The layout decides which names and defaults the fields have.
    read_config = config_from_huggingface if layout == "native" else config_from_legacy
    try:
        plain = {name: value for name, value in values.items() if name not in QUANTIZATION_FIELDS}
        config, schemes = read_config(plain), read_schemes(values)
        unread = unread_fields(plain, layout)
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error
    _check_number(folder, config, stored)
    quantized = _find_quantized(folder, tensors_of(layout, config), stored, schemes)
    _check_tensors(folder, layout, config, stored, quantized)
    revision = fetched.name if fetched is not None else None
    return PytorchFolder(folder, layout, values, config, stored, quantized, unread, revision)


def _find_quantized(
    folder: pathlib.Path,
    tensors: list[Tensor],
    stored: Mapping[str, StoredTensor],
    schemes: tuple[Scheme, ...],
) -> dict[str, QuantizedTensor]:
    """The tensors with quantized weights; none if config.json has no schemes.

    Raises:
      UserError: if they do not match config.json.
    """
    if not schemes:
        return {}
    try:
        found = find_quantized(tensors, stored, schemes)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    # Dequantized weights with the config of their quantized form.
    if not found:
        by = ", ".join(str(scheme) for scheme in schemes)
        raise UserError(
            f"{folder / CONFIG} says that the weights are quantized ({by}), but no tensor has quantized "
            "values; "
            "remove quantization_config, or use the files that belong to it"
        )
    return found


def check_files(folder: pathlib.Path) -> None:
    """Checks that no file that a conversion reads or copies is a pipe or a link out of the folder.

    Raises:
      UserError: if one is; the message names it.
    """
    # All safetensors files, because an attacker controls which ones the index lists.
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    for name in (CONFIG, INDEX, *FILES, *shards):
        check_regular(folder, name)


def stored_tensors(folder: pathlib.Path) -> dict[str, StoredTensor]:
    """Reads the headers of a folder's safetensors files.

    Returns:
      The position of each tensor, by name.

    Raises:
      UserError: if there are no tensors, or index and files are inconsistent.
    """
    if not folder.is_dir():
        raise UserError(f"folder {folder} does not exist; give one with {CONFIG} and safetensors files")
    check_files(folder)
    # An index has precedence; `_indexed_tensors` rejects a single file that the index does not list.
    if (folder / INDEX).exists():
        return _indexed_tensors(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        # Old releases only have pickle files, which deserves a specific message.
        pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
        if pickles:
            raise UserError(
                f"{folder} has no safetensors files, only pickle files ({first_of(pickles)}), which can "
                "execute arbitrary code and are not supported; convert them to safetensors"
            )
        raise UserError(f"{folder} has no safetensors files; it must have {WEIGHTS}, or shards and {INDEX}")
    # Without an index nothing tells whether all shards were downloaded.
    if [file.name for file in files] != [WEIGHTS]:
        names = first_of([file.name for file in files])
        raise UserError(f"{folder} has {names} but no {INDEX}, which must list their tensors")
    return read_header(files[0])


def _indexed_tensors(folder: pathlib.Path) -> dict[str, StoredTensor]:
    listed = _read_index(folder)
    if WEIGHTS not in listed and (folder / WEIGHTS).exists():
        raise UserError(
            f"{folder} has {WEIGHTS}, and {INDEX} does not list it; transformers would load "
            f"{WEIGHTS} and ignore the index, so remove the one that is stale"
        )
    tensors: dict[str, StoredTensor] = {}
    for name, names in sorted(listed.items()):
        # A hostile index could otherwise read files outside of the folder.
        if name != pathlib.PurePath(name).name or name in ("", ".", "..") or "\\" in name:
            raise UserError(f'{folder / INDEX} lists the file "{name}"; it must be a file in the same folder')
        if not check_regular(folder, name):
            raise UserError(f"{folder / name} is missing, but {INDEX} lists tensors in it")
        header = read_header(folder / name)
        # A stale index, for example after a partial download, shows up as such a difference.
        for which, problem in ((names - header.keys(), "lacks"), (header.keys() - names, "also has")):
            if which:
                raise UserError(f"{folder / name} {problem} {first_of(sorted(which))}, unlike {INDEX}")
        tensors |= header
    return tensors


def _read_index(folder: pathlib.Path) -> dict[str, set[str]]:
    """Names of the tensors in each file, as listed in the index."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{folder / INDEX} has no weight_map, which must map each tensor to its file")
    listed: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        # `str`, because a hostile index may map tensors to numbers or lists.
        listed.setdefault(str(name), set()).add(tensor)
    return listed


def notes_on(opened: PytorchFolder) -> list[str]:
    """Notes about what a conversion ignores, and about unusual types."""
    notes = []
    if opened.unread:
        notes.append(f"{opened.folder / CONFIG} has fields that are ignored: {first_of([*opened.unread])}")
    # Files that the index does not list are probably left over from another export.
    used = {tensor.file.name for tensor in opened.stored.values()}
    others = sorted(file.name for file in opened.folder.glob("*.safetensors") if file.name not in used)
    if others:
        notes.append(f"not used of {opened.folder}: {first_of(others)}")
    return notes + _note_types(opened)


def _note_types(opened: PytorchFolder) -> list[str]:
    """Notes if weights are quantized, or have several types; router biases may always differ."""
    names: dict[str, list[str]] = {}
    consumed = _consumed(opened.quantized)
    for name, tensor in sorted(opened.stored.items()):
        if name in consumed:
            continue
        # Released weights have float32 router biases and bfloat16 for the rest.
        if not name.endswith("balancing_biases"):
            names.setdefault(tensor.dtype, []).append(name)
    notes = _note_quantized(opened)
    if len(names) < 2:
        return notes
    # Rarest types first, because those are probably the ones that were changed by hand.
    by_number = sorted(names.items(), key=lambda item: len(item[1]))
    listed = ", ".join(f"{len(each):,} tensors of {dtype} (such as {each[0]})" for dtype, each in by_number)
    return [*notes, f"the weights have several types: {listed}; a weight with two types becomes float32"]


def _note_quantized(opened: PytorchFolder) -> list[str]:
    if not opened.quantized:
        return []
    schemes = sorted({str(tensor.scheme) for tensor in opened.quantized.values()})
    return [
        f"{len(opened.quantized):,} tensors are quantized ({'; '.join(schemes)}): their weights are values "
        "times "
        "scales, and not those of the model that was quantized"
    ]


def _consumed(quantized: Mapping[str, QuantizedTensor]) -> frozenset[str]:
    """Names of stored tensors that belong to quantized ones."""
    return frozenset().union(*(tensor.names for tensor in quantized.values()))


def find_layout(
    folder: pathlib.Path, stored: Mapping[str, StoredTensor], values: Mapping[str, Any]
) -> LayoutName:
    """Detects the layout from tensors and config.json.

    Raises:
      UserError: if they disagree, or the weights are quantized or not of a ZAYA1 model.
    """
    _check_types(folder, stored, values)
    # Names are matched by patterns that occur in one layout only.
    native = sorted(name for name in stored if _NATIVE_NAME.search(name))
    legacy = sorted(name for name in stored if _LEGACY_NAME.search(name.replace("smoe_block", "zaya_block")))
    if native and legacy:
        raise UserError(
            f"{folder} mixes two layouts: {len(native)} tensors have native names ({first_of(native[:2])}), "
            f"{len(legacy)} have legacy names ({first_of(legacy[:2])})"
        )
    if not native and not legacy:
        raise UserError(
            f"{folder} has no ZAYA1 weights: none of its {len(stored)} tensors has a name of either layout"
        )
    # A missing model_type is accepted: tensors have the names of ZAYA1.
    model_type = values.get("model_type", "zaya")
    if model_type != "zaya":
        raise UserError(f'{folder / CONFIG} has model_type "{model_type}"; it must be "zaya"')
    by_tensors: LayoutName = "native" if native else "legacy"
    # Both must agree, because fields of the two layouts have different meanings and defaults.
    by_config: LayoutName = "legacy" if is_legacy_config(values) else "native"
    if by_tensors != by_config:
        raise UserError(
            f"{folder} is inconsistent: its tensors have the {by_tensors} layout, but its {CONFIG} has the "
            f"{by_config} one"
        )
    return by_tensors


def _check_types(folder: pathlib.Path, stored: Mapping[str, StoredTensor], values: Mapping[str, Any]) -> None:
    # config.json says how quantized tensors are to be read.
    if quantization_section(values) is not None:
        return
    unsupported = {name: tensor.dtype for name, tensor in stored.items() if tensor.dtype not in DTYPES}
    named = first_of([f"{name} ({dtype})" for name, dtype in sorted(unsupported.items())])
    if any(dtype in QUANTIZED_DTYPES for dtype in unsupported.values()):
        raise UserError(
            f"{folder} is quantized: {named}; but its {CONFIG} has no quantization_config, which says how"
        )
    if unsupported:
        raise UserError(
            f"{folder} has tensors of unsupported types: {named}; supported types are {', '.join(DTYPES)}"
        )


def _check_number(folder: pathlib.Path, config: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Checks that the files may have all parameters, before lists of tensors are built from the config."""
    values = sum(num_values(tensor) for tensor in stored.values())
    if count_parameters(config) > 100 * values:  # otherwise the error would list all missing tensors
        raise UserError(
            f"{folder / CONFIG} describes {count_parameters(config):,} parameters, but the files contain "
            f"{values:,}; copy the {CONFIG} that belongs to these weights"
        )


def _check_tensors(
    folder: pathlib.Path,
    layout: LayoutName,
    config: ModelConfig,
    stored: Mapping[str, StoredTensor],
    quantized: Mapping[str, QuantizedTensor],
) -> None:
    # Shapes follow from the config, so a mismatch is found before any weight is read.
    expected = {
        tensor.name: tensor.shape for tensor in tensors_of(layout, config) if tensor.name not in quantized
    }
    if TIED_HEAD in stored:
        expected[TIED_HEAD] = expected[EMBEDDING]
    consumed = _consumed(quantized)
    stored = {name: tensor for name, tensor in stored.items() if name not in consumed}
    try:
        check_shapes({name: tensor.shape for name, tensor in stored.items()}, expected, "tensor")
    except UserError as error:
        raise UserError(f"{folder} does not match its {CONFIG}: {error}") from error
    if TIED_HEAD in stored and not _are_equal(stored[TIED_HEAD], stored[EMBEDDING]):
        raise UserError(f"{folder}: {TIED_HEAD} differs from {EMBEDDING}; only a tied head is supported")


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.size) != (other.dtype, other.size):
        return False
    with _opened({one.file, other.file}) as files:
        # In parts: an embedding of 262,272 x 2,048 values is 1 GiB in bfloat16.
        for start in range(0, one.size, COMPARED_BYTES):
            size = min(COMPARED_BYTES, one.size - start)
            parts = [read_bytes(files[tensor.file], tensor.offset + start, size) for tensor in (one, other)]
            if not np.array_equal(parts[0], parts[1]):
                return False
    return True


@contextlib.contextmanager
def _opened(files: set[pathlib.Path]) -> Iterator[dict[pathlib.Path, int]]:
    """Opens files; their descriptors can be read at any offset from any thread."""
    with contextlib.ExitStack() as stack:
        descriptors = {}
        for file in sorted(files):
            # One descriptor per file; `preadv` has no shared position, so threads need no lock.
            descriptors[file] = os.open(file, os.O_RDONLY)
            stack.callback(os.close, descriptors[file])
        yield descriptors


class PytorchWeights:
    """The weights of a folder as a `zaya_jax.convert.stream.Source`; a context manager.

    Quantized weights are read as values times scales, in float32. Their type is that of the embedding's bias,
    which is not quantized: they become weights like the others, rounded once.
    """

    def __init__(self, folder: PytorchFolder):
        self.config = folder.config
        self._places: dict[WeightSlice, tuple[StoredTensor, int, TensorLayout]] = {}
        self._quantized: dict[WeightSlice, QuantizedTensor] = {}
        self._dtypes: dict[str, set[np.dtype]] = {}
        for tensor in tensors_of(folder.layout, folder.config):
            if tensor.name in folder.quantized:
                self._quantized |= dict.fromkeys(tensor.slices, folder.quantized[tensor.name])
            else:
                self._add(tensor, folder.stored[tensor.name])
        self._files = _opened({tensor.file for tensor in folder.stored.values()})
        self._identity = [
            [file.name, file.stat().st_size, file.stat().st_mtime_ns]
            for file in sorted({stored.file for stored in folder.stored.values()})
        ]

    def _add(self, tensor: Tensor, stored: StoredTensor) -> None:
        dtype = DTYPES[stored.dtype]
        self._dtypes.setdefault(tensor.path, set()).add(dtype)
        # Slices are contiguous in a tensor, one after the other.
        offset = stored.offset
        for weight_slice in tensor.slices:
            self._places[weight_slice] = (stored, offset, tensor.layout)
            offset += weight_slice.size * dtype.itemsize

    def __enter__(self) -> "PytorchWeights":
        self._descriptors = self._files.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._files.__exit__(*exception)

    def dtype(self, path: str) -> np.dtype:
        """Type of a weight; float32 if its tensors have several types, because it represents them all."""
        # A weight that is quantized in all layers has no type in the files.
        dtypes = self._dtypes.get(path) or self._dtypes["embedding/bias"]
        return next(iter(dtypes)) if len(dtypes) == 1 else np.dtype(np.float32)

    def read(self, weight_slice: WeightSlice) -> np.ndarray:
        """Reads a slice, with its axes in our order."""
        if weight_slice in self._quantized:
            return self._quantized[weight_slice].decode(self._read_bytes, weight_slice)
        stored, offset, layout = self._places[weight_slice]
        dtype = DTYPES[stored.dtype]
        raw = read_bytes(self._descriptors[stored.file], offset, weight_slice.size * dtype.itemsize)
        return layout.to_ours(raw.view(dtype), weight_slice.shape)

    def quantized(self, weight_slice: WeightSlice) -> QuantizedTensor | None:
        """The quantized tensor that a slice belongs to; None if its weights are not quantized."""
        return self._quantized.get(weight_slice)

    def read_quantized(self, weight_slice: WeightSlice) -> QuantizedValues:
        """Reads the values and scales of a quantized slice, in the order of the layout's axes."""
        return self._quantized[weight_slice].read(self._read_bytes, weight_slice)

    def _read_bytes(self, stored: StoredTensor, offset: int, size: int) -> np.ndarray:
        return read_bytes(self._descriptors[stored.file], stored.offset + offset, size)

    def identity(self) -> list[Any]:
        """JSON-compatible values that change when the files do."""
        return self._identity

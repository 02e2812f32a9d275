"""`zaya convert inspect`: tensors and totals of a folder of weights, without reading the weights."""

import itertools
import math
import pathlib
import re
import shutil

from rich.console import Console
from rich.table import Table

from zaya_jax.convert.output_files import first_reachable_skip
from zaya_jax.convert.pytorch.folder import notes_on
from zaya_jax.convert.pytorch.layouts import EMBEDDING, ROUTER_BIAS, TIED_HEAD, our_weights, tensors_of
from zaya_jax.convert.run_weights import RunWeights
from zaya_jax.convert.verify import is_quantized, num_bytes
from zaya_jax.convert.weight_folder import WeightFolder, open_weight_folder
from zaya_jax.model.weights import count_parameters
from zaya_jax.platform.host_memory import available_memory
from zaya_jax.text_tables import format_bytes, name_column, number_column

_NUMBERS = re.compile(r"\.(\d+)(?=\.)")


def inspect(path: str, console: Console | None = None) -> None:
    """Prints tensors, shapes, types and totals of a folder, and whether they fit on this machine.

    Raises:
      UserError: if the folder contains no readable weights.
    """
    console = console or Console(soft_wrap=True, highlight=False)
    with open_weight_folder(path) as opened:
        console.print(_tensors_table(opened, path))
        console.print(_totals_table(opened, opened.folder))
        for note in notes_on(opened.pytorch) if opened.pytorch is not None else ():
            console.print(f"note: {note}", markup=False)


def _tensors_table(opened: WeightFolder, path: str) -> Table:
    table = Table(
        name_column("tensor"),
        number_column("number"),
        number_column("shape"),
        "type",
        number_column("values"),
        title=f"{path}: {opened.layout} layout",
    )
    rows = [(pattern, shape, dtype) for pattern, shape, dtype in _rows(opened)]
    # Tensors that differ only in the numbers of layers and experts share a row.
    for (pattern, shape, dtype), group in itertools.groupby(sorted(rows)):
        count = len(list(group))
        values = count * math.prod(shape)
        table.add_row(pattern, f"{count:,}", " x ".join(map(str, shape)), dtype, f"{values:,}")
    return table


def _rows(opened: WeightFolder) -> list[tuple[str, tuple[int, ...], str]]:
    """Name of each tensor, with "*" for numbers, its shape and its type."""
    if opened.pytorch is not None:
        stored = opened.pytorch.stored.items()
        return [(_NUMBERS.sub(".*", name), tensor.shape, tensor.dtype) for name, tensor in stored]
    weights = our_weights(opened.source.config).items()
    return [(path, weight.shape, opened.source.dtype(path).name) for path, weight in weights]


def _totals_table(opened: WeightFolder, folder: pathlib.Path) -> Table:
    config, size = opened.source.config, _stored_bytes(opened)
    biases = math.prod(our_weights(config)[ROUTER_BIAS].shape)
    num_tensors = len(_rows(opened))
    # Tells whether the layouts, which define the skip class differently, agree for these weights.
    layer = first_reachable_skip(opened.source)
    table = Table(name_column("what"), name_column("how much"), title="totals")
    if opened.run is not None:
        table.add_row("step", f"{opened.step:,}")
    table.add_row("tensors", f"{num_tensors:,} ({len(tensors_of('native', config)):,} in the native layout)")
    table.add_row("parameters", f"{count_parameters(config):,}, and {biases:,} router biases")
    table.add_row("bytes", f"{size:,} ({format_bytes(size)})")
    # Some exporters store the tied head as well; it is dropped in a conversion.
    if opened.pytorch is not None and TIED_HEAD in opened.pytorch.stored:
        table.add_row("tied head", f"stored a second time, equal to {EMBEDDING}")
    table.add_row(
        "skip class", "unreachable for all tokens" if layer is None else f"reachable in layer {layer}"
    )
    for what, needed, available in _needs(opened, folder):
        fits = "fits" if needed <= available else f"does not fit: {format_bytes(available)} are free"
        table.add_row(what, f"{format_bytes(needed)}, {fits}")
    return table


def _stored_bytes(opened: WeightFolder) -> int:
    """Size of the weights as they are stored, quantized ones with their scales."""
    if opened.pytorch is not None:
        # A tied head that is stored as well is dropped in a conversion.
        return sum(each.size for name, each in opened.pytorch.stored.items() if name != TIED_HEAD)
    return num_bytes(opened)


def _needs(opened: WeightFolder, folder: pathlib.Path) -> list[tuple[str, int, int]]:
    """Name, required bytes and available bytes of each use of the weights."""
    # Free memory and disk now; other processes may change them.
    memory, disk = available_memory(), shutil.disk_usage(folder).free
    float32 = 4 * count_parameters(opened.source.config)
    needs = [
        (
            "disk for a conversion, types unchanged" + ", dequantized" * is_quantized(opened),
            num_bytes(opened),
            disk,
        ),
        ("disk for a conversion to float32", float32, disk),
        ("memory to load and generate, float32", float32, memory),
    ]
    if is_quantized(opened):
        needs.append(("memory to load and generate, quantized", _stored_bytes(opened), memory))
    if isinstance(opened.source, RunWeights):
        # Checkpoints may have larger chunks than slices, which are cached.
        needs.append(("memory for one chunk of each weight", opened.source.chunk_bytes(), memory))
    return needs

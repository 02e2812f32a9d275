"""Options of `zaya convert` for adapters: export of a run's, merging into weights, combination."""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

from zaya_jax.convert.card_facts import CardFacts
from zaya_jax.convert.peft import PeftAdapter, adapter_of_run, combined, read_adapter
from zaya_jax.convert.pytorch.layouts import LayoutName
from zaya_jax.convert.weight_folder import WeightFolder
from zaya_jax.errors import UserError
from zaya_jax.options import Parser


def add_adapter_options(parser: Parser) -> None:
    """Adds the options to the parser of `zaya convert`."""
    group = parser.add_argument_group("adapters", "Folders of adapters have PEFT's format.")
    group.add_argument(
        "--adapters-only",
        action="store_true",
        help="export only the adapters of a run, with module names of --layout native or legacy (default: "
        "merge them into the weights)",
    )
    group.add_argument(
        "--base-model",
        metavar="NAME",
        help="with --adapters-only: hub id or path that the adapter names as its base (default: that of "
        "the weights that the run started from)",
    )
    group.add_argument(
        "--adapter",
        action="append",
        metavar="FOLDER[=WEIGHT]",
        help="merge an adapter into the weights, times a weight (default: 1); may be repeated. With "
        "--adapters-only: combine the adapters into one",
    )
    group.add_argument(
        "--combine",
        choices=("cat", "linear"),
        help="how to combine adapters, as PEFT's add_weighted_adapter: cat adds the updates exactly, and the "
        "ranks; linear adds factors of equal rank (default: cat)",
    )


def check_adapter_options(options: argparse.Namespace) -> None:
    """Checks that options belong together.

    Raises:
      UserError: if they do not.
    """
    # An adapter has module names of one of PyTorch's layouts, and no whole weights to compare.
    if options.adapters_only and (options.layout == "zaya" or options.verify):
        raise UserError("--adapters-only cannot be combined with --layout zaya or --verify; remove those")
    if options.base_model and not options.adapters_only:
        raise UserError("--base-model is a field of an adapter; it needs --adapters-only")
    # Merged into weights, updates add up in any case.
    if options.combine and not (options.adapters_only and options.adapter):
        raise UserError("--combine needs --adapters-only and at least one --adapter")


def weighted_adapters(options: argparse.Namespace) -> list[tuple[PeftAdapter, float]]:
    """Reads the adapters of `--adapter`, with their weights.

    Raises:
      UserError: for a folder that is no adapter, or a weight that is no number.
    """
    return [_weighted_adapter(text) for text in options.adapter or ()]


def _weighted_adapter(text: str) -> tuple[PeftAdapter, float]:
    # A path may contain "=" itself.
    folder, _, weight = text.rpartition("=")
    if not folder or pathlib.Path(text).is_dir():
        return read_adapter(text), 1.0
    try:
        number = float(weight)
    except ValueError as error:
        raise UserError(f'--adapter is "{text}"; what follows "=" must be a number') from error
    return read_adapter(folder), number


def requested_adapter(
    opened: WeightFolder,
    options: argparse.Namespace,
    adapters: Sequence[tuple[PeftAdapter, float]],
    facts: CardFacts,
) -> PeftAdapter:
    """The adapter that `--adapters-only` writes.

    Raises:
      UserError: if the run has none, or adapters cannot be combined.
    """
    # A combination is of files alone: SRC is then only what they adapt.
    if adapters:
        adapter = combined(adapters, options.combine or "cat")
    else:
        names: LayoutName = "legacy" if options.layout == "legacy" else "native"
        # Without the revision: PEFT loads the base by this name.
        base = facts.base_model.partition(" ")[0] if facts.base_model is not None else None
        adapter = adapter_of_run(opened.source, names, base)
    return dataclasses.replace(adapter, base_model=options.base_model or adapter.base_model)

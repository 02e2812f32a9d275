"""Imports test modules of `tests/kernels` a second time, for tests that run them in another way."""

import importlib
import sys
from collections.abc import Iterable


def names_in(module: str, *, without: Iterable[str]) -> dict[str, object]:
    """Returns all names in a new copy of a test module.

    A copy, because a module may keep results between its tests, and plain results prove nothing here.

    Args:
      module: name of the module.
      without: names to exclude.
    """
    plain = sys.modules.pop(module, None)
    try:
        names = dict(vars(importlib.import_module(module)))
    finally:
        sys.modules.pop(module, None)
        if plain is not None:
            sys.modules[module] = plain
    for name in without:
        del names[name]  # a name that the module no longer has is an error
    return {name: value for name, value in names.items() if not name.startswith("__")}

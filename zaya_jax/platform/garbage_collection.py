"""Python's cyclic garbage collector while a process starts."""

import contextlib
import gc
from collections.abc import Iterator

THRESHOLDS = 100_000, 50, 100
"""Thresholds of the three generations during a start; Python's are 700, 10 and 10."""


@contextlib.contextmanager
def rare_collection() -> Iterator[None]:
    """Makes the collector rare in a block that makes millions of objects and few cycles, such as imports.

    With Python's thresholds it traverses all of jax again and again, which is a third of the time of tracing
    the step of configs/tiny.py. After the block it skips the objects that exist by then, most of which live
    as long as the process.
    """
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.freeze()

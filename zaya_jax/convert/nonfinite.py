"""Counts of NaN and infinite weights, which would otherwise only show as nonsense output."""

import collections
import threading
from collections.abc import Iterable, Mapping

import ml_dtypes
import numpy as np

_EXPONENTS = {np.dtype(np.float32): 0x7F800000, np.dtype(np.float16): 0x7C00,
              np.dtype(ml_dtypes.bfloat16): 0x7F80}  # fmt: skip
"""Mask of the exponent bits, which are all set only in NaN and infinities, by type."""
_MAX_NAMED = 3


class NonFinite:
    """Thread-safe counts of NaN and infinite values by weight."""

    def __init__(self):
        self._counts: collections.Counter[str] = collections.Counter()
        self._adding = threading.Lock()

    def count(self, weight: str, values: np.ndarray) -> None:
        """Counts the NaN and infinite values in a part of a weight; quantized values have none."""
        if values.dtype not in _EXPONENTS:
            return
        if number := count_nonfinite(values):
            # Several workers prepare slices at the same time.
            with self._adding:
                self._counts[weight] += number

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts by weight, without weights whose values are all finite."""
        return dict(sorted(self._counts.items()))


def count_nonfinite(values: np.ndarray) -> int:
    """Number of values that are NaN or infinite, for any type that weights can have."""
    # NaN and infinities have all exponent bits set in every IEEE format.
    exponent = np.dtype(f"u{values.dtype.itemsize}").type(_EXPONENTS[values.dtype])
    # Compare bits, and the maximum first: this runs over all bytes of a conversion, and almost never finds
    # one.
    bits = values.view(exponent.dtype) & exponent
    if not bits.size or bits.max() < exponent:
        return 0
    return int((bits == exponent).sum())


def describe_nonfinite(counts: Mapping[str, int]) -> Iterable[str]:
    """Yields a message about NaN and infinite values, if there are any."""
    if counts:
        # Most affected weights first; ties by name, for a stable message.
        worst = sorted(counts, key=lambda weight: (-counts[weight], weight))
        named = ", ".join(f"{weight} ({counts[weight]:,})" for weight in worst[:_MAX_NAMED])
        more = f" and {len(counts) - _MAX_NAMED:,} more weights" if len(counts) > _MAX_NAMED else ""
        yield f"{sum(counts.values()):,} values are NaN or infinite: {named}{more}"

"""Library calls of a compiled program, computed by numpy: their machine code is not part of the program."""

import re

import numpy as np

from zaya_jax.plan.compiled.hlo import GROUPED_PRODUCT, Instruction

AXES = re.compile(r'"(lhs|rhs)_(contracting|batch|ragged|group)_dim(?:ension)?s":\[([^\]]*)\]')
SUPPORTED = {
    ("lhs", "contracting"): '"1"',
    ("rhs", "contracting"): '"1"',
    ("lhs", "batch"): "",
    ("rhs", "batch"): "",
    ("lhs", "ragged"): '"0"',
    ("rhs", "group"): '"0"',
}
"""Axes of the only product that is supported: rows [rows, depth], and weights [groups, depth, columns]."""


def library_product(call: Instruction, operands: list[np.ndarray]) -> np.ndarray:
    """Computes a call of hipBLASLt: a product of each group of rows with the matrix of the group.

    Args:
      call: the custom call.
      operands: rows [rows, depth], matrices [groups, depth, columns], and rows of each group [groups].

    Returns:
      The product [rows, columns], rounded once from float64, in the type of the rows. Rows of no group
      are NaN.

    Raises:
      ValueError: if the call is another one.
    """
    axes = {(side, kind): numbers for side, kind, numbers in AXES.findall(call.attributes)}
    # alpha_real, beta and the epilogue are part of the call; only their neutral values are supported.
    plain = all(part in call.attributes for part in ('"alpha_real":1,', '"beta":0,', '"epilogue":"DEFAULT"'))
    if GROUPED_PRODUCT not in call.attributes or axes != SUPPORTED or not plain:
        raise ValueError(f"unknown library call {call.name}: {call.attributes[:200]}")
    rows, matrices, counts = operands
    result = np.full((len(rows), matrices.shape[2]), np.nan)
    # Rows are sorted by group.
    start = 0
    for matrix, count in zip(matrices, counts, strict=True):
        result[start : start + count] = rows[start : start + count].astype(float) @ matrix.astype(float)
        start += count
    return result.astype(rows.dtype)

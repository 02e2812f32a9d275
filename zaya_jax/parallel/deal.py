"""Who owns what: the weights of a network dealt out to devices, for an optimiser that is sharded.

Everything that the optimiser keeps lies in parts, arrays whose first axis is cut evenly among the
devices. What divides by their number stays as it is: the reshape from a weight to its part costs
nothing, at any size. What does not divide is pooled or padded:

- a stack is a weight of matrices, or as many of them as divide evenly;
- the matrices that are left, of all weights, are sorted by size and dealt in rounds of one matrix a
  device, padded with zeros to the largest of the round. Newton-Schulz of a padded matrix is the
  padded answer, exactly;
- what AdamW moves is cut by elements, anywhere, and padded by less than one a device.

No matrix is cut, each has one owner, and all devices have equally many matrices of about equal size.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from zaya_jax.model.matrices import MatrixAxes, from_matrices, matrix_axes, matrix_sides, to_matrices
from zaya_jax.model.weights import Weight, flatten_weights


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one weight that divide evenly.

    Attributes:
      path: of the weight; also the part's name.
      num_units: how many; a unit is all behind the weight's leading axes that count matrices.
      unit: shape of one, for example [D, Q, F]: both halves of an expert's gate_up_proj.
      axes: of the matrices in the part [num_units, *unit].
    """

    path: str
    num_units: int
    unit: tuple[int, ...]
    axes: MatrixAxes

    @property
    def name(self) -> str:
        """Of the part."""
        return self.path

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part, over all devices."""
        return (self.num_units, *self.unit)

    @property
    def num_matrices(self) -> int:
        """Real ones; a stack has no padding."""
        return math.prod(self.shape) // math.prod(matrix_sides(self.shape, self.axes))


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive matrices of one weight, numbered as `to_matrices` counts them."""

    path: str
    start: int
    stop: int
    rows: int
    columns: int

    @property
    def count(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Round:
    """At most one matrix a device, lying on its long side and padded to the largest.

    Attributes:
      name: of the part.
      num_devices: the length of the part.
      runs: the matrices, one after the other; zeros follow the last.
    """

    name: str
    num_devices: int
    runs: tuple[Run, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the part, over all devices."""
        rows = max(min(run.rows, run.columns) for run in self.runs)
        columns = max(max(run.rows, run.columns) for run in self.runs)
        return self.num_devices, rows, columns

    @property
    def axes(self) -> MatrixAxes:
        """Of the matrices in the part."""
        return MatrixAxes((1,), (2,))

    @property
    def num_matrices(self) -> int:
        """Real ones, without padding."""
        return sum(run.count for run in self.runs)


@dataclasses.dataclass(frozen=True)
class Elements:
    """A weight that AdamW moves, flat: each device has an equal number of its elements."""

    path: str
    num_devices: int
    size: int

    @property
    def name(self) -> str:
        """Of the part."""
        return self.path

    @property
    def shape(self) -> tuple[int, int]:
        """Of the part, over all devices."""
        return self.num_devices, math.ceil(self.size / self.num_devices)


Part = Stack | Round | Elements


@dataclasses.dataclass(frozen=True)
class Deal:
    """How the weights of a network are dealt out. Hashable: it is part of a compiled step.

    Attributes:
      num_devices: that share.
      weights: all declarations by path.
      stacks: matrices that divide evenly.
      rounds: those that do not.
      elements: what AdamW moves.
    """

    num_devices: int
    weights: tuple[tuple[str, Weight], ...]
    stacks: tuple[Stack, ...]
    rounds: tuple[Round, ...]
    elements: tuple[Elements, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """All of them."""
        return (*self.stacks, *self.rounds, *self.elements)

    @property
    def matrix_parts(self) -> tuple[Stack | Round, ...]:
        """Those that Muon moves."""
        return (*self.stacks, *self.rounds)


def deal(declared: Mapping, num_devices: int, *, by_matrix: bool = True) -> Deal:
    """Deals declared weights out to devices.

    Args:
      declared: the tree of `Weight`s.
      num_devices: how many share.
      by_matrix: keeps matrices whole; otherwise all weights are cut by elements, for plain AdamW.
    """
    weights = flatten_weights(declared)
    matrices = {path: weight for path, weight in weights.items() if weight.matrix and by_matrix}
    # A round mixes weights, so that one rule of decay must be right for all of them.
    assert all(weight.decay for weight in matrices.values()), "every matrix decays"
    stacks = [stack for path, weight in matrices.items() if (stack := _stack(path, weight, num_devices))]
    dealt = {stack.path: stack.num_matrices for stack in stacks}
    left = [_run(path, weight, dealt.get(path, 0)) for path, weight in matrices.items()]
    elements = (Elements(path, num_devices, w.size) for path, w in weights.items() if path not in matrices)
    return Deal(
        num_devices, tuple(weights.items()), tuple(stacks), _rounds(left, num_devices), tuple(elements)
    )


def _stack(path: str, weight: Weight, num_devices: int) -> Stack | None:
    axes = matrix_axes(weight)
    assert axes is not None, "only matrices are stacked"
    leading = min(*axes.reduction_axis, *axes.output_axis)  # pyright: ignore[reportGeneralTypeIssues]
    units = math.prod(weight.shape[:leading])
    num_units = units // num_devices * num_devices
    if not num_units:
        return None
    reduced, output = (tuple(i - leading + 1 for i in side) for side in axes)  # pyright: ignore
    return Stack(path, num_units, weight.shape[leading:], MatrixAxes(reduced, output))


def _run(path: str, weight: Weight, start: int) -> Run:
    """The matrices of a weight from `start` on."""
    axes = matrix_axes(weight)
    assert axes is not None, "only matrices are pooled"
    rows, columns = matrix_sides(weight.shape, axes)
    return Run(path, start, weight.size // (rows * columns), rows, columns)


def _rounds(left: Iterable[Run], num_devices: int) -> tuple[Round, ...]:
    """Largest matrices first, as many a round as there are devices."""
    by_size = sorted(left, key=lambda run: sorted((run.rows, run.columns)), reverse=True)
    rounds: list[list[Run]] = []
    room = 0
    for run in by_size:
        while run.count:
            if not room:
                rounds.append([])
                room = num_devices
            taken = min(run.count, room)
            rounds[-1].append(dataclasses.replace(run, stop=run.start + taken))
            run = dataclasses.replace(run, start=run.start + taken)
            room -= taken
    return tuple(Round(f"round {i}", num_devices, tuple(runs)) for i, runs in enumerate(rounds))


def to_parts(dealt: Deal, tree: Mapping) -> dict[str, jax.Array]:
    """The parts, over all devices, that a tree like the weights lies in.

    Weights that the tree leaves out are left out of the parts.
    """
    flat: dict[str, Any] = cast(Any, flatten_dict(tree, sep="/"))
    weights = dict(dealt.weights)
    parts = {}
    for stack in dealt.stacks:
        if stack.path in flat:
            parts[stack.name] = flat[stack.path].reshape(-1, *stack.unit)[: stack.num_units]
    for round_ in dealt.rounds:
        if round_.runs[0].path in flat:
            parts[round_.name] = _fill_round(round_, weights, flat)
    for elements in dealt.elements:
        if elements.path in flat:
            whole = math.prod(elements.shape)
            vector = jnp.pad(flat[elements.path].reshape(-1), (0, whole - elements.size))
            parts[elements.name] = vector.reshape(elements.shape)
    return parts


def from_parts(dealt: Deal, parts: Mapping[str, jax.Array]) -> dict:
    """The tree that lies in some parts: `to_parts` undone. Weights without parts are left out."""
    weights = dict(dealt.weights)
    flat: dict[str, jax.Array] = {}
    pieces: dict[str, list[jax.Array]] = defaultdict(list)
    for stack in dealt.stacks:
        if stack.name in parts:
            if math.prod(stack.shape) == weights[stack.path].size:
                flat[stack.path] = parts[stack.name].reshape(weights[stack.path].shape)
            else:
                pieces[stack.path].append(to_matrices(parts[stack.name], stack.axes))
    for round_ in dealt.rounds:
        if round_.name in parts:
            for run, matrices in _read_round(round_, parts[round_.name]):
                pieces[run.path].append(matrices)
    for path, matrices in pieces.items():
        axes = matrix_axes(weights[path])
        assert axes is not None, "pieces are of matrices"
        flat[path] = from_matrices(jnp.concatenate(matrices), axes, weights[path].shape)
    for elements in dealt.elements:
        if elements.name in parts:
            vector = parts[elements.name].reshape(-1)[: elements.size]
            flat[elements.path] = vector.reshape(weights[elements.path].shape)
    return unflatten_dict(flat, sep="/")


def _fill_round(round_: Round, weights: Mapping[str, Weight], flat: Mapping[str, Any]) -> jax.Array:
    _, rows, columns = round_.shape
    filled = []
    for run in round_.runs:
        axes = matrix_axes(weights[run.path])
        assert axes is not None, "runs are of matrices"
        matrices = to_matrices(flat[run.path], axes)[run.start : run.stop]
        matrices = matrices.swapaxes(1, 2) if run.rows > run.columns else matrices
        padding = (rows - matrices.shape[1], columns - matrices.shape[2])
        filled.append(jnp.pad(matrices, ((0, 0), (0, padding[0]), (0, padding[1]))))
    empty = round_.num_devices - round_.num_matrices
    if empty:
        filled.append(jnp.zeros((empty, rows, columns), filled[0].dtype))
    return jnp.concatenate(filled)


def _read_round(round_: Round, part: jax.Array) -> Iterable[tuple[Run, jax.Array]]:
    starts = itertools.accumulate((run.count for run in round_.runs), initial=0)
    for run, start in zip(round_.runs, starts, strict=False):
        long, short = max(run.rows, run.columns), min(run.rows, run.columns)
        matrices = part[start : start + run.count, :short, :long]
        yield run, matrices.swapaxes(1, 2) if run.rows > run.columns else matrices

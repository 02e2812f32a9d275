"""Reads compiled programs: collectives, their sizes, and matrix products."""

import math
import re

INSTRUCTION = re.compile(r"%?([\w.-]+) = (.*?) ([\w-]+)\((.*)")
ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")


def instructions(text):
    """Yields name, result shapes, operation and the rest of each line."""
    for line in text.splitlines():
        actual = INSTRUCTION.match(line.strip().removeprefix("ROOT "))
        if actual:
            name, result, operation, rest = actual.groups()
            yield name, shapes_of(result), operation, rest


def shapes_of(text):
    return [tuple(int(n) for n in sizes.split(",") if n) for _, sizes in ARRAY.findall(text)]


def collectives(text):
    """Returns the number of elements of each result of each kind of collective on a device."""
    actual = {kind: [] for kind in KINDS}
    for _, shapes, operation, _ in instructions(text):
        kind = operation.removesuffix("-start")
        if kind in actual:
            actual[kind] += [math.prod(shape) for shape in shapes]
    return actual


def matrix_product_flops(text, *, scope):
    """Returns the FLOPs of the products in a named scope."""
    shapes = {name: result[0] for name, result, _, _ in instructions(text) if result}
    total = 0
    for _, result, operation, rest in instructions(text):
        if operation != "dot" or not re.search(rf'["/]{scope}/', rest):
            continue
        left = shapes[re.findall(r"%?([\w.-]+)", re.sub(r"[a-z]+\d*\[[^%]*?%", "%", rest))[0]]
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]+)\}", rest)
        assert contracted, rest
        total += 2 * math.prod(result[0]) * math.prod(left[int(d)] for d in contracted[1].split(","))
    return total

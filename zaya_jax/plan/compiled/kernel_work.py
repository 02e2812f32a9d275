"""FLOPs of a compiled program's kernels, including Pallas kernels, whose work XLA does not know."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from zaya_jax.plan.compiled.hlo import Instruction, Program, Shape, matrix_product

_TRITON = 'custom_call_target="__gpu$xla.gpu.triton"'
_SCORES = {"flash_attention": 2, "flash_attention_grad_keys": 4, "flash_attention_grad_queries": 3}
"""Products of the size of the score matrix per kernel ([FlashAttention] section 3.1): scores and values;
those, and the gradients of values and keys; scores, and the gradients of probabilities and queries."""


class KernelFlops(NamedTuple):
    """FLOPs of a kernel's products by the type of their operands; a multiply-add counts as two."""

    short: float = 0.0
    """With bfloat16 operands, or others of at most 16 bits."""
    float32: float = 0.0
    """With float32 operands, which take several times as long."""

    @property
    def total(self) -> float:
        """FLOPs of products with operands of any type."""
        return self.short + self.float32


def kernel_flops(program: Program, instruction: Instruction, computation: str) -> KernelFlops:
    """FLOPs of one kernel: a library's product, products fused into it, or a Pallas kernel.

    Attention counts the unmasked part where one document fills a sequence.
    """
    shapes = program.shapes(computation)
    if instruction.opcode == "fusion":
        products = [
            _of_operands(matrix_product(inner, program.shapes(name))[0], inner, program.shapes(name))
            for name in instruction.called
            for inner in program.computations.get(name, ())
        ]
        return KernelFlops(*map(math.fsum, zip(*products, strict=True)))
    if is_pallas(instruction):
        operands = [shapes[name][0].sizes for name in instruction.operands if shapes.get(name)]
        flops = _of_pallas(_name(instruction), operands, instruction.shapes[0].sizes)
    else:
        flops = matrix_product(instruction, shapes)[0]
    return _of_operands(flops, instruction, shapes)


def _of_operands(
    flops: float, instruction: Instruction, shapes: Mapping[str, tuple[Shape, ...]]
) -> KernelFlops:
    """FLOPs of a product by the type of its first operand."""
    dtypes = [shapes[name][0].dtype for name in instruction.operands if shapes.get(name)]
    return KernelFlops(float32=flops) if dtypes[:1] == ["f32"] else KernelFlops(short=flops)


def is_pallas(instruction: Instruction) -> bool:
    """Returns whether an instruction is a Pallas kernel, not one that XLA generated or called."""
    return instruction.opcode == "custom-call" and _TRITON in instruction.attributes


def _of_pallas(name: str, operands: list[tuple[int, ...]], made: tuple[int, ...]) -> float:
    if name in _SCORES:
        (rows, queries, heads, width), (_, keys, _, _) = operands[:2]
        # The causal mask removes half of the scores: two FLOPs per multiply-add, times one half.
        return float(_SCORES[name] * rows * heads * queries * keys * width)
    if name.startswith("grouped_"):
        # Each row is multiplied by one matrix of the stack, which is an operand, or the result of a gradient.
        stack = next(sizes for sizes in (*operands[:2], made) if len(sizes) > 2)
        return 2.0 * operands[0][0] * math.prod(stack[1:])
    if name.startswith("cross_entropy"):
        (rows, width), (classes, _) = operands[:2]
        # The kernel of the gradient computes one chunk of the vocabulary, that of the forward pass all of it.
        return 2.0 * rows * width * (made[-1] if "grad" in name else classes)
    if name.startswith("newton_schulz"):
        count, short, long = operands[0]
        # Of a symmetric product only one half is computed.
        return (2.0 if name.endswith("product") else 1.0) * count * short * made[1] * max(long, made[2])
    if name.startswith("cca") and len(operands[0]) == 3:
        # Both convolutions as one: a square matrix per head and per token in the window.
        square = [sizes for sizes in (*operands, made[1:]) if len(sizes) == 4 and sizes[-1] == sizes[-2]]
        return 2.0 * math.prod(operands[0][:2]) * math.prod(square[0]) if square else 0.0
    return 0.0  # all others are bound by memory


def _name(instruction: Instruction) -> str:
    """The kernel's name: the named scope around a Pallas call."""
    parts = instruction.op_name.split("/")
    # The last part is the name of JAX's primitive.
    return parts[-2] if len(parts) > 1 else ""

"""Operations of a compiled program's kernels, those of Pallas included, which XLA knows nothing of."""

import math

from zaya_jax.plan.hlo import Instruction, Program, matrix_product

_TRITON = 'custom_call_target="__gpu$xla.gpu.triton"'
_SCORES = {"flash_attention": 2, "flash_attention_grad_keys": 4, "flash_attention_grad_queries": 3}
"""Products of the size of all scores that a kernel makes ([FlashAttention] section 3.1): scores and values;
those, and gradients of values and keys; scores, gradients of probabilities and queries."""


def kernel_flops(program: Program, instruction: Instruction, computation: str) -> float:
    """Of one kernel: of a library's product, of those fused into it, or of a Pallas kernel's.

    A multiply and an add are two. Attention counts what is not masked where one document fills a sequence.
    """
    shapes = program.shapes(computation)
    if instruction.opcode == "fusion":
        return math.fsum(
            matrix_product(inner, program.shapes(name))[0]
            for name in instruction.called
            for inner in program.computations.get(name, ())
        )
    if instruction.opcode == "custom-call" and _TRITON in instruction.attributes:
        operands = [shapes[name][0].sizes for name in instruction.operands if shapes.get(name)]
        return _of_pallas(_name(instruction), operands, instruction.shapes[0].sizes)
    return matrix_product(instruction, shapes)[0]


def _of_pallas(name: str, operands: list[tuple[int, ...]], made: tuple[int, ...]) -> float:
    if name in _SCORES:
        (rows, queries, heads, width), (_, keys, _, _) = operands[:2]
        # Half of them are in the future.
        return float(_SCORES[name] * rows * heads * queries * keys * width)
    if name.startswith("grouped_"):
        # Each row meets one matrix of the stack, which is an operand or, of a gradient, the result.
        stack = next(sizes for sizes in (*operands[:2], made) if len(sizes) > 2)
        return 2.0 * operands[0][0] * math.prod(stack[1:])
    if name.startswith("cross_entropy"):
        (rows, width), (classes, _) = operands[:2]
        return 2.0 * rows * width * (made[-1] if "grad" in name else classes)
    if name.startswith("newton_schulz"):
        count, short, long = operands[0]
        # Of what is symmetric, one half is made.
        return (2.0 if name.endswith("product") else 1.0) * count * short * made[1] * max(long, made[2])
    if name.startswith("cca") and len(operands[0]) == 3:
        # Both convolutions in one: a square matrix for each head and each token that it sees.
        square = [sizes for sizes in (*operands, made[1:]) if len(sizes) == 4 and sizes[-1] == sizes[-2]]
        return 2.0 * math.prod(operands[0][:2]) * math.prod(square[0]) if square else 0.0
    return 0.0  # all others are bound by memory


def _name(instruction: Instruction) -> str:
    """The named scope around a Pallas call: that of the kernel."""
    parts = instruction.op_name.split("/")
    return parts[-2] if len(parts) > 1 else ""

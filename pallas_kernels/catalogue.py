"""All operations at named sizes, with arguments and work: compiled for reports, timed by benchmarks.

Letters are those of the packages of the operations.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cca import CcaWeights, cca
from pallas_kernels.cross_entropy import cross_entropy
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.grouped_matmul import grouped_feed_forward, grouped_matmul, grouped_swiglu
from pallas_kernels.grouped_matmul.pallas import kernel_name
from pallas_kernels.newton_schulz import newton_schulz
from pallas_kernels.rms_norm import ResidualScaling, residual_rms_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a network and of a batch on one device.

    Attributes:
      batch: sequences of a training batch, B.
      time: tokens of a sequence, T.
      width: model width, D.
      heads: query heads, N.
      key_heads: key and value heads, K.
      head_width: channels of a head, H.
      experts: experts of a layer, E.
      expert_width: hidden width of an expert, F.
      vocabulary: entries of the vocabulary, V.
      slots: cache slots of a sequence when decoding, S.
      sequences: sequences that are decoded together.
    """

    batch: int
    time: int
    width: int
    heads: int
    key_heads: int
    head_width: int
    experts: int
    expert_width: int
    vocabulary: int
    slots: int
    sequences: int

    @property
    def rows(self) -> int:
        """Tokens of the batch, P = B * T."""
        return self.batch * self.time


ZAYA1_8B = Sizes(
    batch=4,
    time=4096,
    width=2048,
    heads=8,
    key_heads=2,
    head_width=128,
    experts=16,
    expert_width=2048,
    vocabulary=262_272,
    slots=32_768,
    sequences=16,
)
SIZES = {
    "zaya1_8b": ZAYA1_8B,
    # No block divides these numbers of tokens, vocabulary entries or slots, so that masks are needed.
    "toy": Sizes(
        batch=2,
        time=40,
        width=48,
        heads=4,
        key_heads=2,
        head_width=16,
        experts=4,
        expert_width=32,
        vocabulary=200,
        slots=150,
        sequences=3,
    ),
    # The widths of ZAYA1-8B decide the tiles of most kernels; with few tokens an emulator needs half an hour.
    "wide": dataclasses.replace(
        ZAYA1_8B, batch=1, time=130, experts=2, expert_width=128, vocabulary=300, slots=300, sequences=2
    ),
}
"""Sizes by name: those of ZAYA1-8B's first phase, and small ones for a machine without a GPU."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Minimum work of an operation.

    Attributes:
      flops: floating-point operations.
      num_bytes: bytes read from and written to device memory, each array once.
    """

    flops: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An operation at given sizes.

    Attributes:
      name: name of the public function.
      function: the operation, a function of the arguments and of `implementation=`.
      make: function from a random key to the arguments.
      num_differentiated: number of leading arguments that have gradients; 0 if the operation has none.
      forward: work of the forward pass.
      backward: work of the backward pass alone.
      kernels: names of its kernels in `backend.launch`; True for those that multiply matrices.
      implementations: implementations that benchmarks compare, ours first.
      forms: implementations that launch our kernels, which reports compile and execute.
      tolerance: largest relative norm of the difference between two implementations in bfloat16: a few
        roundings, times the amplification by the operation.
    """

    name: str
    function: Callable[..., Any]
    make: Callable[[jax.Array], tuple[Any, ...]]
    forward: Work
    kernels: dict[str, bool]
    num_differentiated: int = 0
    backward: Work = Work(0, 0)
    implementations: tuple[str, ...] = ("pallas", "xla")
    forms: tuple[str, ...] = ("pallas",)
    tolerance: float = 0.03

    def with_gradients(self, implementation: str) -> Callable[..., Any]:
        """Returns a function from the arguments to the results and the gradients of their sum."""
        if not self.num_differentiated:
            return functools.partial(self.function, implementation=implementation)

        def call(*arguments):
            first, rest = arguments[: self.num_differentiated], arguments[self.num_differentiated :]
            results, pull_back = jax.vjp(
                lambda *first: self.function(*first, *rest, implementation=implementation), *first
            )
            return results, pull_back(jax.tree.map(jnp.ones_like, results))

        return call

    def with_kernels(self) -> Callable[..., Any]:
        """Returns a function from the arguments to the results and gradients of each of `forms`."""
        return lambda *arguments: [self.with_gradients(form)(*arguments) for form in self.forms]


def cases(sizes: Sizes, dtype: Any = jnp.bfloat16) -> list[Case]:
    """Returns all operations at the given sizes.

    Args:
      sizes: sizes of network and batch.
      dtype: type of the operands of products.
    """
    makers = (
        _residual_rms_norm,
        _flash_attention,
        _grouped_swiglu,
        _grouped_matmul,
        _grouped_feed_forward,
        _few_rows,
        _cross_entropy,
        _newton_schulz,
        _decode_attention,
        _cca,
    )
    return [make(sizes, jnp.dtype(dtype)) for make in makers]


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    return (jax.random.normal(key, shape) * scale).astype(dtype)


def _residual_rms_norm(sizes: Sizes, dtype: jnp.dtype) -> Case:
    rows, width = sizes.rows, sizes.width

    def make(key):
        keys = jax.random.split(key, 7)
        vectors = [1 + 0.1 * _normal(k, (width,), jnp.float32) for k in keys[2:]]
        scaling, scale = ResidualScaling(*vectors[:4]), vectors[4]
        output, residual = (
            _normal(keys[0], (rows, width), dtype),
            _normal(keys[1], (rows, width), jnp.float32),
        )
        return output, residual, scaling, scale

    # Element-wise: the residual stream is float32, the output and the normalized stream have `dtype`.
    size = rows * width
    return Case(
        name="residual_rms_norm",
        function=lambda *arguments, **options: residual_rms_norm(*arguments, eps=1e-5, **options),
        make=make,
        num_differentiated=4,
        forward=Work(10 * size, size * (8 + 2 * dtype.itemsize)),
        backward=Work(30 * size, size * (12 + 3 * dtype.itemsize)),
        kernels={
            "residual_rms_norm": False,
            "residual_rms_norm_backward": False,
            "residual_rms_norm_sums": False,
        },
    )


def _flash_attention(sizes: Sizes, dtype: jnp.dtype) -> Case:
    batch, time, width = sizes.batch, sizes.time, sizes.head_width
    queries, keys = (batch, time, sizes.heads, width), (batch, time, sizes.key_heads, width)

    def make(key):
        parts = jax.random.split(key, 3)
        arrays = [_normal(k, shape, dtype) for k, shape in zip(parts, (queries, keys, keys), strict=True)]
        # One document, so that the kernels of other libraries can do the same. Ours still reads the segments.
        return *arrays, jnp.ones((batch, time), jnp.int32)

    def attend(q, k, v, segments, **options):
        # Without the logsumexp: no other library returns it or differentiates through it.
        return flash_attention(q, k, v, query_segments_BT=segments, key_segments_BS=segments, **options)[0]

    product = batch * sizes.heads * time * (time + 1) * width  # causal: half of 2 * T * T * H
    moved = dtype.itemsize * (math.prod(queries) + math.prod(keys))
    return Case(
        name="flash_attention",
        function=attend,
        make=make,
        num_differentiated=3,
        forward=Work(2 * product, 2 * moved),
        # One product recomputes the scores, and four give the gradients.
        backward=Work(5 * product, 4 * moved),
        kernels={
            "flash_attention": True,
            "flash_attention_grad_queries": True,
            "flash_attention_grad_keys": True,
        },
    )


def _group_sizes(key: jax.Array, sizes: Sizes) -> jax.Array:
    # A uniform router: expert loads differ by chance, as in training, and rarely fill whole tiles.
    experts_P = jax.random.randint(key, (sizes.rows,), 0, sizes.experts)
    return jnp.sum(experts_P[:, None] == jnp.arange(sizes.experts), axis=0, dtype=jnp.int32)


def _grouped(sizes: Sizes, dtype: jnp.dtype, shape: tuple[int, int]) -> tuple[Callable, Work]:
    """Returns a function that makes the arguments, and the work of one product."""
    rows, experts = sizes.rows, sizes.experts

    def make(key):
        parts = jax.random.split(key, 3)
        weights = _normal(parts[1], (experts, *shape), dtype, shape[0] ** -0.5)
        return _normal(parts[0], (rows, shape[0]), dtype), weights, _group_sizes(parts[2], sizes)

    moved = rows * sum(shape) + experts * math.prod(shape)
    return make, Work(2 * rows * math.prod(shape), moved * dtype.itemsize)


def _twice(work: Work) -> Work:
    # The gradients of rows and of weights are one product each.
    return Work(2 * work.flops, 2 * work.num_bytes)


def _grouped_swiglu(sizes: Sizes, dtype: jnp.dtype) -> Case:
    make, work = _grouped(sizes, dtype, (sizes.width, 2 * sizes.expert_width))
    return Case(
        name="grouped_swiglu",
        function=grouped_swiglu,
        make=make,
        num_differentiated=2,
        forward=Work(work.flops, work.num_bytes + sizes.rows * sizes.expert_width * dtype.itemsize),
        backward=_twice(work),
        kernels={
            kernel_name("grouped_swiglu", sizes.rows): True,
            "grouped_swiglu_grad_rows": True,
            "grouped_swiglu_grad_weights": True,
        },
    )


def _grouped_matmul(sizes: Sizes, dtype: jnp.dtype) -> Case:
    make, work = _grouped(sizes, dtype, (sizes.expert_width, sizes.width))
    return Case(
        name="grouped_matmul",
        function=grouped_matmul,
        make=make,
        num_differentiated=2,
        forward=work,
        backward=_twice(work),
        kernels={
            kernel_name("grouped_matmul", sizes.rows): True,
            "grouped_matmul_grad_rows": True,
            "grouped_matmul_grad_weights": True,
        },
    )


def _grouped_feed_forward(sizes: Sizes, dtype: jnp.dtype) -> Case:
    """Both products of the experts; our kernels compute the gradients alone."""
    first, up = _grouped(sizes, dtype, (sizes.width, 2 * sizes.expert_width))
    _, down = _grouped(sizes, dtype, (sizes.expert_width, sizes.width))

    def make(key):
        parts = jax.random.split(key, 3)
        rows, gate_up, group_sizes = first(parts[0])
        shape = (sizes.experts, sizes.expert_width, sizes.width)
        weights = _normal(parts[1], shape, dtype, sizes.expert_width**-0.5)
        scale = jax.random.uniform(parts[2], (sizes.rows,), minval=0.1)
        return rows, gate_up, weights, scale, group_sizes

    def call(rows, gate_up, down, scale, group_sizes, **options):
        return grouped_feed_forward(rows, gate_up, down, group_sizes, scale_P=scale, **options)

    # Gate and up are written and read once more in each direction, and so are the activations.
    between = 6 * sizes.rows * sizes.expert_width * dtype.itemsize
    work = Work(up.flops + down.flops, up.num_bytes + down.num_bytes)
    return Case(
        name="grouped_feed_forward",
        function=call,
        make=make,
        num_differentiated=4,
        forward=Work(work.flops, work.num_bytes + between),
        backward=Work(2 * work.flops, 2 * work.num_bytes + between),
        kernels={
            "activation_backward": False,
            "grouped_matmul_grad_rows": True,
            "grouped_matmul_grad_weights": True,
        },
        implementations=("ragged_dot+pallas", "pallas", "xla"),
        forms=("ragged_dot+pallas",),
    )


def _few_rows(sizes: Sizes, dtype: jnp.dtype) -> Case:
    """Both products of the experts for one token of each sequence, as decoding computes them."""
    sizes = dataclasses.replace(sizes, batch=sizes.sequences, time=1)
    case = _grouped_feed_forward(sizes, dtype)
    # Only the matrices that a row selects are read: so many by a uniform router, on average.
    num_read = round(sizes.experts * (1 - (1 - 1 / sizes.experts) ** sizes.rows))
    moved = num_read * 3 * sizes.width * sizes.expert_width * dtype.itemsize
    return dataclasses.replace(
        case,
        name="grouped_feed_forward of few rows",
        num_differentiated=0,
        forward=Work(case.forward.flops, moved),
        backward=Work(0, 0),
        kernels={kernel_name(name, sizes.rows): True for name in ("grouped_swiglu", "grouped_matmul")},
        implementations=("pallas", "xla"),
        forms=("pallas",),
    )


def _cross_entropy(sizes: Sizes, dtype: jnp.dtype) -> Case:
    rows, width, entries = sizes.rows, sizes.width, sizes.vocabulary

    def make(key):
        parts = jax.random.split(key, 3)
        hidden = _normal(parts[0], (rows, width), dtype)
        # With this scale the logits have a variance of about one, as those of a network at the start.
        table = _normal(parts[1], (entries, width), dtype, width**-0.5)
        targets = jax.random.randint(parts[2], (rows,), 0, entries, jnp.int32)
        return hidden, table, targets, jnp.ones((rows,), jnp.float32)

    product, moved = 2 * rows * width * entries, dtype.itemsize * width * (rows + entries)
    return Case(
        name="cross_entropy",
        function=cross_entropy,
        make=make,
        num_differentiated=2,
        # "pallas" computes the logits once more in the backward pass; the minimum work of it is two products.
        forward=Work(product, moved),
        backward=Work(2 * product, 2 * moved),
        kernels={
            "cross_entropy": True,
            "cross_entropy_grad_logits": True,
            # The last chunk, if the vocabulary is not a multiple of the chunk.
            "cross_entropy_grad_logits_rest": True,
            "cross_entropy_probabilities": True,
        },
        implementations=("pallas", "xla", "pallas+xla"),
        forms=("pallas", "pallas+xla"),
    )


def _newton_schulz(sizes: Sizes, dtype: jnp.dtype) -> Case:
    """One iteration on the first matrices of a layer's experts."""
    num_matrices, rows, columns = sizes.experts, sizes.width, 2 * sizes.expert_width
    step = (3.4445, -4.7750, 2.0315)

    def make(key):
        # The polynomials need singular values of at most about 1, which the Frobenius norm bounds ([Muon]).
        x_MRC = _normal(key, (num_matrices, rows, columns), jnp.float32)
        return ((x_MRC / jnp.linalg.norm(x_MRC, axis=(1, 2), keepdims=True)).astype(dtype),)

    short, long = sorted((rows, columns))
    # The Gram matrix and its square are symmetric: half of each is enough.
    flops = num_matrices * (3 * short**2 * long + short**3)
    moved = num_matrices * (3 * short * long + 4 * short**2) * dtype.itemsize
    return Case(
        name="newton_schulz",
        function=lambda x_MRC, **options: newton_schulz(x_MRC, (step,), **options),
        make=make,
        forward=Work(flops, moved),
        # The rounding of each term is multiplied by its coefficient.
        tolerance=2.0**-8 * sum(map(abs, step)) * 2,
        kernels={"newton_schulz_gram": True, "newton_schulz_polynomial": True, "newton_schulz_product": True},
    )


def _decode_attention(sizes: Sizes, dtype: jnp.dtype) -> Case:
    """One new token for each sequence, with full caches."""
    batch, width = sizes.sequences, sizes.head_width
    queries, cache = (batch, sizes.heads, width), (batch, sizes.slots, sizes.key_heads, width)

    def make(key):
        parts = jax.random.split(key, 3)
        arrays = [_normal(k, shape, dtype) for k, shape in zip(parts, (queries, cache, cache), strict=True)]
        return *arrays, jnp.full((batch,), sizes.slots, jnp.int32)

    # Two products, scores and weighted values, each with a multiplication and an addition.
    flops = 4 * batch * sizes.slots * sizes.heads * width
    return Case(
        name="decode_attention",
        function=decode_attention,
        make=make,
        forward=Work(flops, 2 * dtype.itemsize * (math.prod(queries) + math.prod(cache))),
        kernels={"decode_attention": True},
    )


def _cca(sizes: Sizes, dtype: jnp.dtype) -> Case:
    """CCA with two taps in each convolution and half of each head rotated, as in all ZAYA1 models."""
    num_taps, width = 2, sizes.head_width
    heads = sizes.heads + sizes.key_heads
    channels = heads * width

    def make(key):
        keys = jax.random.split(key, 8)
        kernel = _normal(keys[0], (heads, num_taps, width, width), jnp.float32, (num_taps * width) ** -0.5)
        weights = CcaWeights(
            _normal(keys[1], (num_taps, channels), jnp.float32),
            _normal(keys[2], (channels,), jnp.float32),
            kernel,
            _normal(keys[3], (channels,), jnp.float32),
            1 + 0.1 * _normal(keys[4], (sizes.key_heads,), jnp.float32),
        )
        latent = _normal(keys[5], (sizes.batch, sizes.time, channels), dtype)
        tail = _normal(keys[6], (sizes.batch, 2 * num_taps - 2, channels), dtype)
        angles = jax.random.uniform(keys[7], (1, sizes.time, width // 4), maxval=6)
        segments = jnp.ones((sizes.batch, sizes.time), jnp.int32)
        return latent, tail, weights, (jnp.cos(angles), jnp.sin(angles)), segments

    def call(latent, tail, weights, rotation, segments, **options):
        return cca(latent, tail, weights, rotation, segments_BT=segments, **options)

    # Only the second convolution is counted: the first has one multiplication where that one has `width`.
    product, moved = 2 * sizes.rows * channels * num_taps * width, sizes.rows * channels * dtype.itemsize
    return Case(
        name="cca",
        function=call,
        make=make,
        num_differentiated=3,
        forward=Work(product, 2 * moved),
        backward=Work(2 * product, 3 * moved),
        # The gradient of a temperature is a sum of terms of both signs, which may nearly cancel.
        tolerance=0.1,
        kernels={
            "cca_join": False,
            "cca": True,
            "cca_grad_mixed": True,
            "cca_grad_latent": True,
            "cca_grad_kernel": True,
            "cca_sums": False,
            "cca_join_grad": False,
        },
    )

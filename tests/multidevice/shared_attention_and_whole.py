"""Context-parallel exchanges and attention, compared with whole sequences.

Prints the largest differences as JSON. A program, not a test: the number of devices is fixed when jax starts.
`test_shared_sequences.py` runs it.
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from small_models import EXECUTION, SLIDING, SMALL

from pallas_kernels.flash_attention import flash_attention
from zaya_jax.model.attention.context_parallel import context_parallel_attention
from zaya_jax.model.attention.sequence_chunks import share_sequences
from zaya_jax.parallel import context
from zaya_jax.parallel.mesh import BATCH, data_mesh, on_each_device, zigzag_order

ROWS, N, K, H = 2, 4, 2, 8
REACHES = [
    # ranks, chunk length, tokens back: within a chunk, several chunks, past the start of the sequence
    (2, 4, 3), (4, 2, 5), (8, 1, 3), (3, 2, 40), (1, 3, 2), (2, 3, 0),
]  # fmt: skip
CASES = {
    # window, ranks, chunk length: windows shorter and longer than a chunk, and than all other chunks
    "first": [(None, 4, 3), (5, 4, 1), (3, 2, 8)],
    "more": [(None, 8, 1), (5, 4, 4), (9, 2, 3), (1, 2, 2)],
}


def on_devices(function, ranks):
    """Turns a function of a device's tokens [B, 2*S, ...] into one of whole sequences [B, T, ...]."""
    mesh = data_mesh(jax.devices()[:ranks], context_devices=ranks)
    local = jax.jit(on_each_device(function, mesh, in_specs=BATCH, out_specs=BATCH))

    def of_sequences(*arrays):
        order = zigzag_order(arrays[0].shape[1], ranks)
        actual = local(*(x[:, order] for x in arrays))
        return jax.tree.map(lambda x: np.asarray(x)[:, np.argsort(order)], actual)

    return of_sequences


def largest(ours, theirs):
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)), initial=0.0)) for a, b in pairs)


def tokens_before(ranks, size, reach):
    """Returns the first token before each chunk, repeated to the chunk's shape."""
    length = 2 * ranks * size
    x_BTX = np.random.default_rng(0).standard_normal((ROWS, length, 3)).astype(np.float32)

    def local(x_BSX):
        before = context.last_tokens_before(context.to_chunks(x_BSX), reach)
        assert before.shape[1] == reach
        return context.from_chunks(jnp.repeat(jnp.sum(before, axis=1, keepdims=True), size, axis=1))

    padded = np.concatenate([np.zeros((ROWS, reach, 3), np.float32), x_BTX], axis=1)
    sums = [padded[:, i * size : i * size + reach].sum(axis=1, keepdims=True) for i in range(2 * ranks)]
    return largest(on_devices(local, ranks)(x_BTX), np.repeat(np.concatenate(sums, axis=1), size, axis=1))


def attention(form, window, ranks, size):
    """Compares values and gradients of attention across devices."""
    length, random = 2 * ranks * size, np.random.default_rng(size)
    shapes = [(ROWS, length, n, H) for n in (N, K, K, N)]
    *qkv, weights = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    segments_BT = 1 + np.cumsum(random.random((ROWS, length)) < 0.2, axis=1, dtype=np.int32)
    segments_BT[1, length - length // 4 :] = 0  # padding
    model = SMALL if window is None else dataclasses.replace(SLIDING, sliding_window=window)
    execution = dataclasses.replace(EXECUTION, context_attention=form)

    def whole(q, k, v):
        segments = {"query_segments_BT": segments_BT, "key_segments_BS": segments_BT}
        return flash_attention(q, k, v, window=window, implementation="full", **segments)[0]

    def local(segments, weights, *qkv):
        chunks = share_sequences(context.to_chunks(segments))

        def attend(*qkv):
            rows = map(context.to_chunks, qkv)
            is_sliding = jnp.array(window is not None, jnp.int32)
            return context.from_chunks(
                context_parallel_attention(model, execution, *rows, is_sliding, chunks)
            )

        out, pull = jax.vjp(attend, *qkv)
        return out, pull(weights)

    expected, pull = jax.vjp(jax.jit(whole), *qkv)
    actual = on_devices(local, ranks)(segments_BT, weights, *qkv)
    return largest(actual, (expected, pull(weights)))


def gathered_gradient(ranks, size):
    """Gradients include every device's use of a token."""
    length = 2 * ranks * size
    x_BTX = np.ones((ROWS, length, 3), np.float32)

    def local(x_BSX):
        def weigh(x):
            return jnp.sum(context.all_tokens(context.to_chunks(x)) * (1 + context.rank()))

        return jax.grad(weigh)(x_BSX)

    return largest(on_devices(local, ranks)(x_BTX), np.full_like(x_BTX, ranks * (ranks + 1) / 2))


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "tokens before": max(tokens_before(*case) for case in REACHES),
                "gathered gradient": max(gathered_gradient(*case) for case in ((2, 3), (8, 1))),
                **{
                    f"{form} {case}": attention(form, *case)
                    for form in ("gathered", "ring")
                    for case in CASES[sys.argv[1]]
                },
            }
        )
    )

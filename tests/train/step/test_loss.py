"""The loss in chunks and by the kernel, compared with the loss and gradients of explicit logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.config import ExecutionConfig
from zaya_jax.train.step.loss import next_token_loss

TOKENS, WIDTH, VOCABULARY = 23, 8, 41


def inputs():
    random = np.random.default_rng(0)
    x_PD = random.standard_normal((TOKENS, WIDTH))
    table_VD, bias_V = random.standard_normal((VOCABULARY, WIDTH)), random.standard_normal(VOCABULARY)
    targets_P = random.integers(0, VOCABULARY, TOKENS)
    weights_P = random.uniform(0, 2, TOKENS) * (np.arange(TOKENS) % 4 > 0)
    floats = (jnp.asarray(x, jnp.float32) for x in (x_PD, table_VD, bias_V, weights_P))
    x_PD, table_VD, bias_V, weights_P = floats
    return x_PD, table_VD, bias_V, jnp.asarray(targets_P), weights_P


def plain(x_PD, table_VD, bias_V, targets_P, weights_P, z_loss):
    logits_PV = x_PD @ table_VD.T + (0 if bias_V is None else bias_V)
    entropy_P = -jax.nn.log_softmax(logits_PV)[jnp.arange(TOKENS), targets_P]
    z_P = jax.nn.logsumexp(logits_PV, axis=1) ** 2
    return jnp.sum((entropy_P + z_loss * z_P) * weights_P), jnp.sum(entropy_P * weights_P)


@pytest.mark.parametrize(
    ("chunk", "z_loss", "has_bias"),
    [(100, 0.0, True), (5, 0.01, True), (5, 0.0, False), ("kernel", 0.01, True), ("kernel", 0.0, False)],
)
def test_value_and_gradients(chunk, z_loss, has_bias):
    x_PD, table_VD, bias_V, targets_P, weights_P = inputs()
    bias_V = bias_V if has_bias else None

    def loss_of(*arguments):
        how = {"loss_implementation": "pallas"} if chunk == "kernel" else {"loss_chunk": chunk}
        return next_token_loss(*arguments, execution=ExecutionConfig(**how), z_loss=z_loss)

    def ours(x_PD, table_VD, bias_V):
        loss = loss_of(x_PD, table_VD, bias_V, targets_P, weights_P)
        return 3 * loss.objective, loss.cross_entropy

    def expected(x_PD, table_VD, bias_V):
        objective, entropy = plain(x_PD, table_VD, bias_V, targets_P, weights_P, z_loss)
        return 3 * objective, entropy

    arguments = (x_PD, table_VD, bias_V)
    actual, theirs = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))(*arguments) for f in (ours, expected)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, theirs)
    value = loss_of(*arguments, targets_P, weights_P)  # without gradients
    np.testing.assert_allclose(value.objective, theirs[0][0] / 3, rtol=1e-5)


def in_chunks(chunk, x_PD, table_VD, targets_P, weights_P):
    execution = ExecutionConfig(loss_chunk=chunk)
    return next_token_loss(x_PD, table_VD, None, targets_P, weights_P, execution=execution).objective


def test_gradients_of_bfloat16_accumulate_in_float32():
    """4,096 tokens of one target: each adds 2^-12 to its row, which in bfloat16 would stop at 2^-4."""
    tokens = 4096
    x_PD, table_VD = jnp.ones((tokens, 1), jnp.bfloat16), jnp.zeros((256, 1), jnp.bfloat16)
    targets_P, weights_P = jnp.zeros(tokens, jnp.int32), jnp.full(tokens, 1 / tokens)

    def objective(table_VD):
        return in_chunks(64, x_PD, table_VD, targets_P, weights_P)

    grad_VD = jax.grad(objective)(table_VD)
    assert grad_VD.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(grad_VD[0, 0]), 1 / 256 - 1, rtol=2**-7)


def temporary_bytes(chunk):
    """Memory of the loss and its gradients at 16k tokens and ZAYA1's vocabulary, by the compiler."""
    tokens, vocabulary, width = 16_384, 262_272, 16

    def objective(x_PD, table_VD, targets_P, weights_P):
        return in_chunks(chunk, x_PD, table_VD, targets_P, weights_P)

    shapes = (
        jax.ShapeDtypeStruct((tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((vocabulary, width), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )
    compiled = jax.jit(jax.grad(objective, argnums=(0, 1))).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_only_one_chunk_of_logits_exists_at_a_time():
    """All logits are 16 GiB; those of 512 tokens half a GiB, twice for their gradient."""
    assert temporary_bytes(16_384) > 16 * 2**30
    assert temporary_bytes(512) < 1.25 * 2**30

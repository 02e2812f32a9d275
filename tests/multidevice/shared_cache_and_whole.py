"""Decodes with a shared cache and with a whole one, and prints the differences as JSON.

A program, not a test: the number of devices is fixed when jax starts. `test_shared_cache.py` runs it.
"""

import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import re
import sys
import tempfile

import hlo
import jax
import jax.numpy as jnp
import numpy as np
from small_models import EXECUTION, SLIDING, SMALL
from small_runs import make_base, small_values

from zaya_jax.config import ExecutionConfig
from zaya_jax.inference.command import main as generate_command
from zaya_jax.inference.engine import generate as generate_module
from zaya_jax.inference.engine.cache_rows import make_cache
from zaya_jax.inference.engine.decoder import DecodeRows, PromptChunk, decode_steps, prefill_chunk
from zaya_jax.inference.engine.generate import generate
from zaya_jax.inference.engine.sampling import row_sampling
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.model.cache import attend_through_cache, init_cache, layer_slots
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.mesh import REPLICATED, SLOTS, context_mesh, on_each_device, replicated

ONE_LAYER = dataclasses.replace(SMALL, num_hidden_layers=1)
ROWS, HEADS, KEY_HEADS, WIDTH = 4, SMALL.num_attention_heads, SMALL.num_key_value_heads, SMALL.head_dim
GREEDY = row_sampling([SamplingParams(max_new_tokens=1)] * 2, SMALL.vocab_size)


def plain_attention(q_NH, k_SKH, v_SKH):
    """Attention of one token to all, in float64."""
    group = q_NH.shape[0] // k_SKH.shape[1]
    out_NH = np.zeros(q_NH.shape)
    for head in range(q_NH.shape[0]):
        scores_S = k_SKH[:, head // group] @ q_NH[head] / np.sqrt(q_NH.shape[1])
        probs_S = np.exp(scores_S - scores_S.max())
        out_NH[head] = probs_S / probs_S.sum() @ v_SKH[:, head // group]
    return out_NH


def dealt(tokens_BTKH, ranks):
    """Orders keys by device: token t is on device t % ranks."""
    time = tokens_BTKH.shape[1]
    padded = np.pad(tokens_BTKH, ((0, 0), (0, -time % ranks), (0, 0), (0, 0)))
    return np.concatenate([padded[:, rank::ranks] for rank in range(ranks)], axis=1).astype(np.float32)


def attention(ranks, exchange, implementation):
    """Returns the maximum error of one token's attention compared with float64, over lengths and paddings."""
    room, random = 50, np.random.default_rng(0)  # 50 slots: no number of devices here divides it
    mesh = context_mesh(ranks)
    cache = init_cache(ONE_LAYER, ROWS, room, "float32", ranks=ranks, exchange=exchange)
    cache = dataclasses.replace(cache, empty=False)
    slots = jax.tree.map(lambda x: x[0], layer_slots(ONE_LAYER, room, ranks))
    execution = ExecutionConfig(decode_implementation=implementation)

    def newest(q, k, v, pool, length, first_B):
        here = dataclasses.replace(cache, length=length, first_B=first_B)
        return attend_through_cache(ONE_LAYER, execution, q, k, v, pool, slots, here, None)

    in_specs = (REPLICATED, REPLICATED, REPLICATED, SLOTS, REPLICATED, REPLICATED)
    run = jax.jit(on_each_device(newest, mesh, in_specs=in_specs, out_specs=(REPLICATED, SLOTS)))
    q_BTNH = 2 * random.standard_normal((ROWS, room, HEADS, WIDTH))
    keys, values = random.standard_normal((2, ROWS, room, KEY_HEADS, WIDTH))
    worst, written, agree = 0.0, True, True
    for last in (0, 1, ranks - 1, ranks, 2 * ranks + 1, room - 1):
        # The whole text, half of it, two tokens, and one, so that all devices but one have no token.
        first_B = np.array([0, last // 2, max(last - 1, 0), last], np.int32)
        before = tuple(
            dealt(np.where(np.arange(room)[:, None, None] < last, x, 9), ranks) for x in (keys, values)
        )
        now = slice(last, last + 1)
        chunk = (np.asarray(x[:, now], np.float32) for x in (q_BTNH, keys, values))
        out_B1NH, pool = run(*chunk, before, np.int32(last), first_B)
        bits = {np.asarray(part.data).tobytes() for part in out_B1NH.addressable_shards}
        agree &= len(bits) == 1
        for row, first in enumerate(first_B):
            seen = slice(first, last + 1)
            expected = plain_attention(q_BTNH[row, last], keys[row, seen], values[row, seen])
            worst = max(worst, float(np.abs(out_B1NH[row, 0] - expected).max()))
        after = (dealt(np.where(np.arange(room)[:, None, None] <= last, x, 9), ranks) for x in (keys, values))
        written &= all(np.array_equal(ours, theirs) for ours, theirs in zip(pool, after, strict=True))
    return {"error": worst, "written": bool(written), "agree": agree}


@functools.cache
def network(config):
    model = Zaya(config, EXECUTION)
    return model, jax.jit(model.init)(jax.random.key(11), jnp.zeros((1, 4), jnp.int32))


def prompts(*lengths):
    random = np.random.default_rng(3)
    return [random.integers(0, SMALL.vocab_size, length).tolist() for length in lengths]


def texts(ranks):
    """Texts of ragged batches; prompts of several chunks, which the padding of short rows may fill."""
    generate_module.SHARED_PREFILL_CHUNK = 16
    run = functools.partial(generate, *network(SLIDING), max_new_tokens=20)
    batch, actual = prompts(1, 33, 75, 16), {}
    for name, settings in {"greedy": {}, "drawn": {"temperature": 0.9, "top_k": 9, "seed": 5}}.items():
        whole, shared = run(batch, **settings), run(batch, **settings, context_devices=ranks)
        actual[name] = [whole, shared]
    return actual


def command(ranks):
    """Returns the output of `zaya generate` with its option and without."""
    written = []
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder) / "run"
        make_base(run, small_values(run_folder=str(run), corpus="none"))
        words = [str(run), "--prompt", "def f12(left):", "--max-new-tokens", "40"]
        for flag in ([], ["--context-devices", str(ranks)]):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                generate_command([*words, *flag])
            written.append(out.getvalue())
    return written


def start(ranks, *, config=SLIDING, max_length=64, time=16):
    """The model, its weights, and the cache and first tokens of two rows after their prefill."""
    model, variables = network(config)
    if ranks > 1:
        variables = jax.device_put(variables, replicated(context_mesh(ranks)))
    tokens_BT = jnp.asarray(np.array(prompts(time, time), np.int32))
    zero = jnp.zeros((), jnp.int32)
    chunk = PromptChunk(tokens_BT, jnp.ones_like(tokens_BT), jnp.arange(2), zero, jnp.asarray(True))
    cache = make_cache(model, variables, 2, max_length, padding="left", context_devices=ranks)
    cache, first, _ = prefill_chunk(model, variables, cache, chunk, GREEDY)
    ends_BJ = jnp.full((2, 8), -1, jnp.int32)
    return model, variables, cache, DecodeRows(first.token_B, jnp.full(2, 1000), ends_BJ)


def exchanges(ranks):
    """Returns tokens, whether all devices agree, and the elements that a layer sends, for both exchanges."""
    actual = {}
    for exchange in ("tree", "ring"):
        model, variables, cache, rows = start(ranks)
        cache = dataclasses.replace(cache, exchange=exchange)
        arguments = variables, cache, rows, GREEDY, 39
        program = decode_steps.lower(model, *arguments, max_steps=40).compile()
        cache, steps, _ = program(*arguments)
        first_B = np.asarray(rows.newest_B)
        tokens = [
            [
                [first, *row]
                for first, row in zip(first_B.tolist(), np.asarray(part.data)[:39].T.tolist(), strict=True)
            ]
            for part in steps.sampled.token_B.addressable_shards
        ]
        text = program.as_text()
        actual[exchange] = {
            "tokens": tokens[0],
            "agree": tokens == tokens[:1] * ranks,
            "sent": hlo.collectives(text),
            "rounds": [int(n) for n in re.findall(r'known_trip_count":{"n":"(\d+)"', text)],
            "shards": shard_shapes(cache),
        }
    return actual


def shard_shapes(cache):
    """Returns the shape of keys and values, which must be equal on all devices."""
    return sorted({part.data.shape for x in cache.pool for part in x.addressable_shards})


def million(ranks):
    """Text after 2**20 - 5 random tokens, whose second row begins late: shared, and on one device."""
    room = 2**20
    config = dataclasses.replace(SMALL, max_position_embeddings=room)
    shape = (2, config.num_hidden_layers, 2, room, KEY_HEADS, WIDTH)
    tokens_XLBTKH = np.random.default_rng(1).standard_normal(shape, np.float32)
    first_B, results = np.array([0, room - room // 3], np.int32), []
    for number in (1, ranks):
        model, variables, cache, rows = start(number, config=config, max_length=room)
        pool = (in_pool(x, number) for x in tokens_XLBTKH)
        pool = tuple(jax.device_put(x, like.sharding) for x, like in zip(pool, cache.pool, strict=True))
        cache = dataclasses.replace(
            cache, pool=pool, length=jnp.asarray(room - 5, jnp.int32), first_B=jnp.asarray(first_B)
        )
        cache, steps, _ = decode_steps(model, variables, cache, rows, GREEDY, 4, max_steps=4)
        tokens_MB = [np.asarray(rows.newest_B).tolist(), *np.asarray(steps.sampled.token_B).tolist()]
        results.append((np.transpose(tokens_MB).tolist(), cache))
    (_, one), (_, shared) = results
    return {
        "tokens": [tokens for tokens, _ in results],
        "state": difference(shared.state, one.state),
        "length": int(shared.length),
        "shards": shard_shapes(shared),
        "whole": one.pool[0].shape,
    }


def in_pool(tokens_LBTKH, ranks):
    """Keys of all layers in a pool's layout, [B, ranks*L*S, K, H]: with the layers of a device together."""
    layers, batch, time, *rest = tokens_LBTKH.shape
    by_rank = tokens_LBTKH.reshape(layers, batch, time // ranks, ranks, *rest)
    return by_rank.transpose(1, 3, 0, 2, 4, 5).reshape(batch, -1, *rest)


def difference(ours, theirs):
    """Returns the maximum relative difference in norm over all leaves."""
    pairs = zip(*(jax.tree.leaves(jax.device_get(tree)) for tree in (ours, theirs)), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def quick():
    """The checks of the normal test suite, in one process."""
    cases = ((8, "tree"), (8, "ring"), (3, "tree"))
    return {
        "attention": {f"{ranks} {how}": attention(ranks, how, "xla") for ranks, how in cases},
        "texts": {"8": texts(8)},
        "exchanges": exchanges(8),
    }


def slow():
    """Interpreted kernels, other numbers of devices, and the command."""
    cases = ((8, "tree"), (5, "ring"))
    return {
        "attention": {f"{ranks} {how}": attention(ranks, how, "pallas") for ranks, how in cases},
        "texts": {ranks: texts(ranks) for ranks in (2, 3)},
        "command": command(4),
    }


if __name__ == "__main__":
    print(json.dumps({"quick": quick, "slow": slow, "million": lambda: million(8)}[sys.argv[1]]()))

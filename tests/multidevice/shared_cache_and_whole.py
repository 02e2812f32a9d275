"""Decodes where devices share the cache and where one has all of it; prints what differs, as JSON.

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
from zaya_jax.inference import decoding as decoding_module
from zaya_jax.inference import generate as generate_module
from zaya_jax.inference.command import main as generate_command
from zaya_jax.inference.decoding import Rule, decode, prefill
from zaya_jax.inference.generate import generate
from zaya_jax.inference.sampling import Sampling
from zaya_jax.model.cache import attend_through_cache, init_cache, layer_slots
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.mesh import REPLICATED, SLOTS, context_mesh, on_each_device, replicated

ONE_LAYER = dataclasses.replace(SMALL, num_hidden_layers=1)
ROWS, HEADS, KEY_HEADS, WIDTH = 4, SMALL.num_attention_heads, SMALL.num_key_value_heads, SMALL.head_dim
GREEDY = Rule(jax.random.key(0), Sampling(temperature=0), jnp.asarray(-1, jnp.int32))


def plain_attention(q_NH, k_SKH, v_SKH):
    """Of one token to all, in float64."""
    group = q_NH.shape[0] // k_SKH.shape[1]
    out_NH = np.zeros(q_NH.shape)
    for head in range(q_NH.shape[0]):
        scores_S = k_SKH[:, head // group] @ q_NH[head] / np.sqrt(q_NH.shape[1])
        probs_S = np.exp(scores_S - scores_S.max())
        out_NH[head] = probs_S / probs_S.sum() @ v_SKH[:, head // group]
    return out_NH


def dealt(tokens_BTKH, ranks):
    """Keys as devices have them: token t is of the device t % ranks; those of each lie together."""
    time = tokens_BTKH.shape[1]
    padded = np.pad(tokens_BTKH, ((0, 0), (0, -time % ranks), (0, 0), (0, 0)))
    return np.concatenate([padded[:, rank::ranks] for rank in range(ranks)], axis=1).astype(np.float32)


def attention(ranks, exchange, implementation):
    """The largest error of one token's attention, against float64, over lengths and paddings."""
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
        # All of the text; half of it; two tokens; one, so that but for one device all have nothing to see.
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
    decoding_module.PREFILL_CHUNK = generate_module.PREFILL_CHUNK = 16
    run = functools.partial(generate, *network(SLIDING), max_new_tokens=20)
    batch, found = prompts(1, 33, 75, 16), {}
    for name, settings in {"greedy": {}, "drawn": {"temperature": 0.9, "top_k": 9, "seed": 5}}.items():
        whole, shared = run(batch, **settings), run(batch, **settings, context_devices=ranks)
        found[name] = [whole, shared]
    return found


def command(ranks):
    """What `zaya generate` writes, with its flag and without."""
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
    """The network, its weights, two rows behind their prefill, and the mesh that they are on."""
    mesh = context_mesh(ranks) if ranks > 1 else None
    model, variables = network(config)
    if mesh is not None:
        variables = jax.device_put(variables, replicated(mesh))
    tokens_BT = np.array(prompts(time, time), np.int32)
    segments_BT = np.ones_like(tokens_BT)
    state = prefill(model, variables, tokens_BT, segments_BT, GREEDY, max_length=max_length, mesh=mesh)
    return model, variables, state, mesh


def exchanges(ranks):
    """Of either: tokens, whether all devices have the same, and what a layer's program sends, in elements."""
    found = {}
    for exchange in ("tree", "ring"):
        model, variables, state, mesh = start(ranks)
        cache = dataclasses.replace(state.cache, exchange=exchange)
        state = dataclasses.replace(state, cache=cache)
        program = decode.lower(model, variables, state, GREEDY, 40, mesh=mesh).compile()
        state = program(variables, state, GREEDY, 40)
        tokens = [np.asarray(part.data)[:, :40].tolist() for part in state.tokens_BM.addressable_shards]
        text = program.as_text()
        found[exchange] = {
            "tokens": tokens[0],
            "agree": tokens == tokens[:1] * ranks,
            "sent": hlo.collectives(text),
            "rounds": [int(n) for n in re.findall(r'known_trip_count":{"n":"(\d+)"', text)],
            "shards": shard_shapes(state),
        }
    return found


def shard_shapes(state):
    """Of keys and values, on all devices: one shape, if all have as much."""
    return sorted({part.data.shape for x in state.cache.pool for part in x.addressable_shards})


def million(ranks):
    """Text behind 2**20 - 5 random tokens, of which the second row begins late: shared, and on one device."""
    room = 2**20
    config = dataclasses.replace(SMALL, max_position_embeddings=room)
    shape = (2, config.num_hidden_layers, 2, room, KEY_HEADS, WIDTH)
    tokens_XLBTKH = np.random.default_rng(1).standard_normal(shape, np.float32)
    first_B, states = np.array([0, room - room // 3], np.int32), []
    for number in (1, ranks):
        model, variables, state, mesh = start(number, config=config, max_length=room)
        pool = (in_pool(x, number) for x in tokens_XLBTKH)
        pool = tuple(jax.device_put(x, like.sharding) for x, like in zip(pool, state.cache.pool, strict=True))
        cache = dataclasses.replace(
            state.cache, pool=pool, length=jnp.asarray(room - 5, jnp.int32), first_B=jnp.asarray(first_B)
        )
        state = dataclasses.replace(state, cache=cache)
        states.append(decode(model, variables, state, GREEDY, 5, mesh=mesh))
    one, shared = states
    return {
        "tokens": [np.asarray(state.tokens_BM)[:, :5].tolist() for state in states],
        "state": difference(shared.cache.state, one.cache.state),
        "length": int(shared.cache.length),
        "shards": shard_shapes(shared),
        "whole": one.cache.pool[0].shape,
    }


def in_pool(tokens_LBTKH, ranks):
    """Keys of all layers as a pool has them, [B, ranks*L*S, K, H]: a device has its layers side by side."""
    layers, batch, time, *rest = tokens_LBTKH.shape
    by_rank = tokens_LBTKH.reshape(layers, batch, time // ranks, ranks, *rest)
    return by_rank.transpose(1, 3, 0, 2, 4, 5).reshape(batch, -1, *rest)


def difference(ours, theirs):
    """The largest relative difference in norm of any leaf."""
    pairs = zip(*(jax.tree.leaves(jax.device_get(tree)) for tree in (ours, theirs)), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def quick():
    """What the suite asks for at every run, in one process."""
    cases = ((8, "tree"), (8, "ring"), (3, "tree"))
    return {
        "attention": {f"{ranks} {how}": attention(ranks, how, "xla") for ranks, how in cases},
        "texts": {"8": texts(8)},
        "exchanges": exchanges(8),
    }


def slow():
    """Kernels, which are interpreted here, other numbers of devices, and the command."""
    cases = ((8, "tree"), (5, "ring"))
    return {
        "attention": {f"{ranks} {how}": attention(ranks, how, "pallas") for ranks, how in cases},
        "texts": {ranks: texts(ranks) for ranks in (2, 3)},
        "command": command(4),
    }


if __name__ == "__main__":
    print(json.dumps({"quick": quick, "slow": slow, "million": lambda: million(8)}[sys.argv[1]]()))

"""Flipped bits in what one device owns are found in the next step, which then changes nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import EXECUTION, SMALL

from zaya_jax.config import Config, DataConfig, OptimizerConfig, TrainConfig, WatchConfig
from zaya_jax.data.corpora.delimiters import DocumentDelimiters
from zaya_jax.data.reading.batch import make_example
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.compiled_programs import sealed
from zaya_jax.train.hooks.anomalies import LossSpikeDetector
from zaya_jax.train.step.integrity import (
    ORDER,
    ROWS,
    array_checksum,
    names_of,
    place_batch,
    row_checksums,
)
from zaya_jax.train.step.state import init_state, make_setup, shardings
from zaya_jax.train.step.train_step import train_step

ROWS_OF_BATCH, TIME = 4, 16
MESH = data_mesh(jax.devices()[:1])
SIGN, EXPONENT, MANTISSA = "sign", "exponent", "mantissa"
BITS = {SIGN: (31,), EXPONENT: tuple(range(23, 31)), MANTISSA: tuple(range(23))}
PLACES = ("weights", "moments", "gradients")
INTERVAL = 1
"""Number of steps within which checksums show a flipped bit: the step that would use the value."""
ROUNDING = 1e-6
"""Relative change of a loss that a sum in another order causes."""


def config(*, checksums=True):
    return Config(
        model=dataclasses.replace(SMALL, num_hidden_layers=1),
        data=DataConfig(sequence_length=TIME, batch_size=ROWS_OF_BATCH),
        optimizer=OptimizerConfig(learning_rate=1e-3, final_learning_rate=1e-4, warmup_steps=0),
        train=TrainConfig(num_steps=1000),
        execution=EXECUTION,
        watch=WatchConfig(checksums=checksums, replay=checksums),
    )


def flipped(array, place, bit):
    """Returns an array with one flipped bit."""
    bits = np.array(array).reshape(-1).view(np.uint32)
    bits[place] ^= np.uint32(1 << bit)
    # With its sharding: with another one the step would be compiled again.
    return jax.device_put(bits.view(np.float32).reshape(array.shape), array.sharding)


@functools.cache
def setup_of(*, checksums=True):
    return make_setup(config(checksums=checksums), 1)


@functools.cache
def step_of(*, checksums=True):
    """The step, whose third argument has the bits of the summed gradients that are flipped."""

    def tamper(masks, gradients):
        to_bits, to_float = (
            functools.partial(jax.lax.bitcast_convert_type, new_dtype=t) for t in ("uint32", "float32")
        )
        return {name: to_float(to_bits(x) ^ masks[name]) for name, x in gradients.items()}

    return jax.jit(
        lambda state, batch, masks: train_step(
            state,
            batch,
            setup=setup_of(checksums=checksums),
            mesh=MESH,
            tamper=functools.partial(tamper, masks),
        )
    )


@functools.cache
def first_state(*, checksums=True):
    setup = setup_of(checksums=checksums)
    state = sealed(jax.jit(functools.partial(init_state, config(checksums=checksums), setup))(), MESH)
    # As a step returns it, so that one program makes all steps.
    return jax.device_put(state, shardings(state, MESH))


def no_masks():
    return {name: np.zeros(x.shape, np.uint32) for name, x in first_state().buckets.items()}


def host_batch(step):
    tokens_BT = np.random.default_rng(step).integers(1, SMALL.vocab_size, (ROWS_OF_BATCH, TIME))
    batch = make_example(tokens_BT, delimiters=DocumentDelimiters(bos_id=1, eos_id=-1, pad_id=0))
    index_B = np.arange(ROWS_OF_BATCH) + step * ROWS_OF_BATCH
    origin_BC2 = np.stack([index_B, 0 * index_B], axis=1)[:, None].astype(np.uint32)
    return dataclasses.replace(batch, origin_BC2=origin_BC2)


def batch_of(step, *, checksums=True):
    batch = host_batch(step)
    return place_batch(batch if checksums else dataclasses.replace(batch, origin_BC2=None), MESH)


@functools.cache
def after(num_steps, *, checksums=True):
    """The state after some steps, and their losses."""
    state, losses = first_state(checksums=checksums), []
    for step in range(num_steps):
        state, metrics = step_of(checksums=checksums)(state, batch_of(step, checksums=checksums), no_masks())
        losses.append(float(metrics.loss))
    return state, losses


def failures(state):
    names = names_of(state, has_gradients=True).failed
    (failed_F,) = np.asarray(state.integrity.failed_DF)
    return {names[column]: int(failed_F[column]) for column in np.flatnonzero(failed_F)}


def bits_of(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def planted(random, where, bit, state):
    """Plants a flip; returns the state, the masks of gradients, and the name of what is flipped."""
    masks = no_masks()
    if where == "gradients":
        name = random.choice(sorted(masks))
        masks[name].reshape(-1)[random.integers(masks[name].size)] = 1 << bit
        return state, masks, f"summed gradient of {name}"
    field = {"weights": "buckets", "moments": "optimizer"}[where]
    leaves, structure = jax.tree_util.tree_flatten_with_path({field: getattr(state, field)})
    number = random.choice([n for n, (_, leaf) in enumerate(leaves) if leaf.dtype == jnp.float32])
    path, leaf = leaves[number]
    changed = [x for _, x in leaves]
    changed[number] = flipped(leaf, random.integers(leaf.size), bit)
    field_value = jax.tree.unflatten(structure, changed)[field]
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return dataclasses.replace(state, **{field: field_value}), masks, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_any_flipped_bit_changes_the_checksum(dtype):
    """The sum of bits times odd factors modulo 2**32, by Python's integers."""
    random = np.random.default_rng(0)
    array = jnp.asarray(random.standard_normal((3, 5, 7)) * 100, dtype)
    bits = np.asarray(array).reshape(-1).view(f"uint{8 * array.dtype.itemsize}")
    checksum = jax.jit(array_checksum)
    assert int(checksum(array)) == sum(int(b) * (2 * n + 1) for n, b in enumerate(bits)) % 2**32
    assert int(jax.jit(array_checksum)(array, after=jnp.float32(-1.7))) == int(checksum(array))
    width = 8 * bits.itemsize
    for place, bit in zip(random.integers(bits.size, size=40), random.permutation(40) % width, strict=True):
        damaged = bits.copy()
        damaged[place] ^= bits.dtype.type(1 << bit)
        assert int(checksum(jnp.asarray(damaged.view(np.asarray(array).dtype).reshape(3, 5, 7)))) != int(
            checksum(array)
        )
    assert int(checksum(array[:, ::-1])) != int(checksum(array))


def test_host_and_device_compute_the_same_checksums_of_rows():
    batch = host_batch(3)
    np.testing.assert_array_equal(jax.jit(row_checksums)(batch), row_checksums(batch))
    assert len(set(row_checksums(batch).tolist())) == ROWS_OF_BATCH


def test_checks_change_no_bit_and_raise_no_alarm():
    (state, losses), (plain, expected) = after(3), after(3, checksums=False)
    assert losses == expected
    assert failures(state) == {}
    assert bits_of(state.buckets) == bits_of(plain.buckets)
    assert bits_of(state.optimizer) == bits_of(plain.optimizer)
    assert plain.integrity is None


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("bit", [31, 30, 22, 0])
def test_a_flip_is_found_and_the_step_changes_nothing(where, bit):
    state, masks, name = planted(np.random.default_rng(bit), where, bit, after(3)[0])
    new, metrics = step_of()(state, batch_of(3), masks)
    assert failures(new) == {name: 4}
    assert int(metrics.mismatches) == 1
    # Nor does any later step, until the host has read the failure.
    later, metrics = step_of()(new, batch_of(4), no_masks())
    assert int(metrics.mismatches) >= 1
    assert failures(later)[name] == 4
    for each in (new, later):
        assert bits_of((each.buckets, each.optimizer)) == bits_of((state.buckets, state.optimizer))
    assert int(later.step) == 5


def test_damaged_and_misplaced_rows_are_found():
    state, _ = after(3)
    rows = batch_of(3)
    damaged = dataclasses.replace(rows, targets_BT=rows.targets_BT.at[2, 5].add(1))
    assert failures(step_of()(state, damaged, no_masks())[0]) == {ROWS: 4}
    for stale in (2, 4):
        assert failures(step_of()(state, batch_of(stale), no_masks())[0]) == {ORDER: 4}
    assert int(step_of()(state, rows, no_masks())[1].mismatches) == 0


@pytest.mark.campaign
def test_campaign_of_flips(capsys):
    """200 flips: which detector sees each in the next two steps, and what it does to the loss without any."""
    random, warm = np.random.default_rng(41), 24
    state, losses = after(warm)
    plain, _ = after(warm, checksums=False)
    clean = [float(step_of(checksums=False)(plain, batch_of(warm, checksums=False), no_masks())[1].loss)]
    follow, _ = step_of(checksums=False)(plain, batch_of(warm, checksums=False), no_masks())
    clean.append(
        float(step_of(checksums=False)(follow, batch_of(warm + 1, checksums=False), no_masks())[1].loss)
    )
    rows = []
    for number in range(200):
        where, kind = PLACES[number % 3], (SIGN, EXPONENT, MANTISSA)[number // 3 % 3]
        bit, seed = int(random.choice(BITS[kind])), int(random.integers(2**31))
        damaged, masks, name = planted(np.random.default_rng(seed), where, bit, state)
        found = failures(step_of()(damaged, batch_of(warm), masks)[0])
        unseen, masks, _ = planted(np.random.default_rng(seed), where, bit, plain)
        spikes = LossSpikeDetector(WatchConfig(spike_window=8, spike_steps=1), losses)
        is_spike, change = False, 0.0
        for step in range(2):
            batch = batch_of(warm + step, checksums=False)
            unseen, metrics = step_of(checksums=False)(unseen, batch, masks if step == 0 else no_masks())
            loss = float(metrics.loss)
            is_spike |= spikes.add(warm + step + 1, loss) is not None
            change = max(change, abs(loss - clean[step]) / clean[step] if np.isfinite(loss) else np.inf)
        # Failures have the number of their step, from 1; the flip occurred after the step `warm`.
        steps = found[name] - warm if set(found) == {name} else np.inf
        rows.append((where, kind, steps < np.inf, int(unseen.skipped_steps) > 0, is_spike, change, steps))
    with capsys.disabled():
        print(
            f"\nplace      bits      flips  checksums  non-finite  spike  loss changes by {ROUNDING} or more"
        )
        for where in PLACES:
            for kind in BITS:
                part = [row for row in rows if row[:2] == (where, kind)]
                seen = [sum(row[column] for row in part) for column in (2, 3, 4)]
                changed = sum(row[5] > ROUNDING for row in part)
                print(f"{where:10} {kind:9} {len(part):5} {seen[0]:10} {seen[1]:11} {seen[2]:6} {changed:8}")
        shares = [sum(row[column] for row in rows) / len(rows) for column in (2, 3, 4)]
        print(f"all: {', '.join(f'{share:.1%}' for share in shares)} by each detector")
        of_loss = [row[6] for row in rows if row[5] > ROUNDING]
        print(f"{len(of_loss)} change the loss: unseen for {max(of_loss)} step at most")
    assert len(rows) == 200
    assert all(row[6] <= INTERVAL for row in rows)

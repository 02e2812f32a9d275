"""Memory and messages of GPUs that share sequences, by hand: keys and values take 1 KiB per token and
layer.
"""

import dataclasses

import pytest

from zaya_jax.options import load_config
from zaya_jax.plan.memory import memory_by_kind
from zaya_jax.plan.shares import Exchange, exchange, keys_bytes, micro_batch, own_tokens

GPUS, LAYERS, KIB = 1024, 40, 2**10
HALO = 2 * (8 + 2) * 128 + 2 * 128 // 2
"""Number of values before a chunk: two latents, and half the values of one token."""


@pytest.fixture(scope="module")
def phases():
    return {phase.name: phase.config for phase in load_config("configs/zaya1_8b.py", []).resolved_phases}


def changed(config, **execution):
    return dataclasses.replace(config, execution=dataclasses.replace(config.execution, **execution))


@pytest.mark.parametrize(("phase", "ranks"), [("midtrain", 2), ("finetune", 8)])
def test_every_gpu_has_as_many_tokens_as_in_the_published_recipe(phases, phase, ranks):
    config = phases[phase]
    assert config.execution.context_devices == ranks
    assert (micro_batch(config, GPUS), own_tokens(config)) == (1, 16_384)


def test_gathered_keys_are_received_twice_unless_all_are_kept(phases):
    config = phases["finetune"]
    of_others = 7 * 16_384
    assert exchange(config, GPUS) == Exchange(
        keys=2 * LAYERS * of_others * KIB,
        gradients=LAYERS * of_others * 2 * KIB,  # in float32
        halos=3 * LAYERS * 2 * HALO * 2,  # of two chunks, forward, once more and backward
    )
    assert exchange(changed(config, remat="products"), GPUS) == exchange(config, GPUS)
    assert exchange(changed(config, remat="none"), GPUS).keys == LAYERS * of_others * KIB


def test_a_ring_holds_one_share_of_the_keys_at_a_time(phases):
    gathered, ring = phases["finetune"], changed(phases["finetune"], context_attention="ring")
    # Keys, and their gradients in float32.
    assert keys_bytes(gathered) == 131_072 * 3 * KIB
    assert keys_bytes(ring) == 16_384 * 3 * KIB
    assert exchange(ring, GPUS).keys == 1.5 * exchange(gathered, GPUS).keys
    result = memory_by_kind(ring, GPUS)
    assert result["keys and values of shared sequences"] == 16_384 * 3 * KIB


def test_gpus_with_whole_sequences_exchange_none(phases):
    config = phases["pretrain_1"]
    assert exchange(config, GPUS) == Exchange()
    assert keys_bytes(config) == 0
    assert micro_batch(config, GPUS) == 4

"""Training with shared sequences equals training with whole sequences."""

import functools
from collections import Counter

import pytest
from programs import program

trained = functools.partial(program, "shared_sequences_and_whole.py")


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["first", pytest.param("more", marks=pytest.mark.campaign)])
def test_attention_across_devices_equals_that_of_whole_sequences(cases):
    """Values and gradients; gathered and ring; windows and chunks of all sizes; float32."""
    actual = program("shared_attention_and_whole.py", cases)
    assert len(actual) >= 8
    assert all(error < 1e-5 for error in actual.values()), actual


@pytest.mark.parametrize("form", ["gathered", "ring"])
@pytest.mark.campaign
def test_a_run_on_shared_sequences_equals_one_on_whole_sequences(form):
    for actual in trained("train", form).values():
        assert actual["router_counts_LX"] == 0
        assert all(error < 1e-5 for error in actual.values()), actual


def test_keys_are_gathered_once_per_layer_and_their_gradients_reduce_scattered():
    actual = trained("messages", "gathered")
    # Devices, sequences, their two chunks, chunk length, heads of keys and of values, head width.
    assert actual["all_gather"].count("4x4x2x4x4x8xf32") == 1
    assert actual["reduce_scatter"].count("1x4x2x4x4x8xf32") == 1
    assert Counter(actual["collective_permute"]) == halos(directions=2)


def test_a_ring_permutes_only_keys_and_values():
    actual = trained("messages", "ring")
    arrays = [shape.count("x") for kind in ("all_gather", "reduce_scatter") for shape in actual[kind]]
    # Buckets of weights and, once per step, the document numbers.
    assert max(arrays) == 4
    assert [shape for shape in actual["all_gather"] if "i32" in shape] == ["4x4x2x4xi32"]
    # Two chunks per device: keys and values, forward and backward, to the first visit and in the loop to the
    # later ones; their gradients in the loop, to the last visit, and back to the owner.
    keys = Counter({"4x4x4x8xf32": 2 * (2 * 2 + 3)})
    assert Counter(actual["collective_permute"]) == halos(directions=2) + keys


def halos(*, directions):
    """Per boundary between chunks: two latents of (4 + 2) * 8 channels, and half of the values of 2 * 8.

    Sent to the previous and to the next device; the gradients of all of it return.
    """
    return Counter({"4x2x48xf32": 2 * directions, "4x1x8xf32": 2 * directions})


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(12))
def test_any_shape_trains_twenty_steps_as_one_device(seed):
    """Steps amplify rounding differences, up to a hundredfold: a control run measures by how much."""
    actual = trained("campaign", str(seed), limit_seconds=1500)
    errors = actual["shared"]
    assert errors["router_counts_LX"] == 0, actual
    bound = min(1e-5 + 30 * max(actual["rounding"].values()), 1e-3)
    assert all(error < bound for error in errors.values()), actual

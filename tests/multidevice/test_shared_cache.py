"""Decoding with a cache that devices share equals decoding on one device."""

import functools

import pytest
from programs import program

DEVICES = 8
ROWS, HEADS, KEY_HEADS, WIDTH, SLOTS = 2, 4, 2, 8, 8
"""Of what is compiled: `SMALL`'s heads, and 64 tokens of room over eight devices."""


decoded = functools.partial(program, "shared_cache_and_whole.py")


@pytest.mark.parametrize("what", ["quick", pytest.param("slow", marks=pytest.mark.campaign)])
def test_a_token_attends_to_the_cache_of_all_devices(what):
    """Rows of all lengths, down to one token, which seven devices do not have; compared with float64."""
    for case, actual in decoded(what)["attention"].items():
        assert actual["error"] < 1e-5, case
        assert actual["written"], case  # by the device that stores it, and by no other
        # Bitwise: devices that chose different tokens would deadlock in a collective.
        assert actual["agree"], case


@pytest.mark.parametrize("what", ["quick", pytest.param("slow", marks=pytest.mark.campaign)])
def test_texts_equal_those_of_one_device(what):
    """Ragged batches, prompts of several chunks, and lengths that are not divisible."""
    for texts in decoded(what)["texts"].values():
        for whole, shared in texts.values():
            assert shared == whole
            assert all(len(set(text)) > 3 for text in whole)


@pytest.mark.campaign
def test_the_command_writes_the_same_text():
    whole, shared = decoded("slow")["command"]
    assert shared == whole
    assert len(shared) > len("def f12(left):")


def test_all_devices_choose_the_same_tokens():
    """Forty tokens, with both exchanges."""
    tree, ring = decoded("quick")["exchanges"].values()
    assert tree["agree"]
    assert ring["agree"]
    assert tree["tokens"] == ring["tokens"]


def test_a_device_stores_its_part_of_full_layers_and_complete_rings_of_sliding_layers():
    for actual in decoded("quick")["exchanges"].values():
        assert actual["shards"] == [[ROWS, 5 + SLOTS + 5, KEY_HEADS, WIDTH]]


def test_a_tree_sends_two_small_sums_per_layer_and_a_ring_all_keys():
    """Only in the one of three layers without a window; the size does not grow with the text."""
    tree, ring = decoded("quick")["exchanges"].values()
    # The maximum of the logsumexp; then the outputs with the weights by which they are divided.
    assert sorted(tree["sent"]["all-reduce"]) == [ROWS * HEADS, ROWS * HEADS * (WIDTH + 1)]
    # Keys and values of a device in each iteration of a loop.
    assert ring["sent"]["collective-permute"] == [ROWS * SLOTS * KEY_HEADS * WIDTH] * 2
    assert DEVICES - 1 in ring["rounds"]
    assert DEVICES - 1 not in tree["rounds"]
    assert [kind for kind, sizes in tree["sent"].items() if sizes] == ["all-reduce"]
    assert [kind for kind, sizes in ring["sent"].items() if sizes] == ["collective-permute"]


@pytest.mark.campaign
def test_a_million_tokens_over_eight_devices():
    """Random keys with a small average: a missing device changes the state by 5e-3."""
    actual = decoded("million")
    shared, whole = actual["shards"], actual["whole"]
    assert whole == [2, 2 * 2**20, KEY_HEADS, WIDTH]
    assert shared == [[2, 2 * 2**20 // DEVICES, KEY_HEADS, WIDTH]]
    assert actual["length"] == 2**20 - 1
    assert actual["tokens"][0] == actual["tokens"][1]
    assert actual["state"] < 1e-5

"""Faults in a run of eight devices: each is noticed, the device is named, and no clean run has an alarm."""

import functools

import pytest
from programs import program

FOUND = {
    "flip": ([7, 0, "router_bias_LX"],),
    "flip_weight": ([7, 0, "buckets/embedding/bias"],),
    "flip_gradient": ([6, 0, "summed gradient of embedding/bias"],),
    "flip_input": ([6, 0, "rows of the batch"],),
    # One process reads the rows of all eight devices.
    "stale": tuple([6, device, "order of the batch"] for device in range(8)),
    "lost": tuple([6, device, "order of the batch"] for device in range(8)),
}


@functools.cache
def results():
    return program("corrupted_runs.py")


@pytest.mark.campaign
@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_names_device_and_tensor(fault):
    actual = results()[fault]
    first = [each for each in actual["findings"] if each[0] == actual["findings"][0][0]]
    assert first == list(FOUND[fault])
    assert FOUND[fault][0][2] in actual["diverged"]


@pytest.mark.campaign
def test_a_flipped_moment_names_its_owner():
    ((step, device, tensor), *more) = results()["flip_moment"]["findings"]
    assert (step, device, more) == (7, 0, [])
    assert tensor.startswith("optimizer/")


@pytest.mark.campaign
def test_a_repetition_names_a_device_that_computed_something_else():
    """No checksum shows it, because the device's result is consistent with what it read."""
    actual = results()["miscompute"]
    assert {(step, device) for step, device, _ in actual["findings"]} == {(6, 0)}
    assert all(tensor.startswith("gradient of ") for _, _, tensor in actual["findings"])
    assert actual["replayed"] == ["routine: step 6 repeated on the same devices with different results"]


@pytest.mark.campaign
def test_repetitions_of_clean_runs_are_equal_here_and_elsewhere():
    """Also where devices share sequences and experts; losses then differ by the order of sums."""
    requested, clean = results()["requested"], results()["clean"]
    assert requested["replayed"] == [
        "requested: step 6 repeated on the same devices and on others with equal results"
    ]
    for actual in (requested, clean):
        assert (actual["diverged"], actual["findings"]) == (None, [])
    assert clean["replayed"] == []
    assert clean["losses"] == pytest.approx(requested["losses"], rel=1e-5)

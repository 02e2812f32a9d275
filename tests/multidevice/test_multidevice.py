"""Training on eight devices equals training on one device."""

import pytest
from programs import program as run_program


def program(what):
    # Without the compilation cache, whose programs have the scope names of their first writer.
    return run_program("eight_devices_and_one.py", what, keeps_programs=what != "inspect")


@pytest.mark.slow
def test_eight_devices_train_as_one():
    found = program("compare")
    assert found["devices"] == 8
    assert found["tokens"] == [3 * 200] * 12  # three layers; padding does not count
    assert found["moved"] > 1e-2
    assert all(error < 1e-5 for error in found["eight and one"].values()), found


@pytest.mark.slow
def test_a_checkpoint_of_eight_devices_is_resumed_on_two():
    assert all(error < 1e-5 for error in program("compare")["resumed on two"].values())


def test_gradients_are_reduce_scattered_and_weights_all_gathered():
    """Each part once; only a few values are summed over all devices: norms, counts and the loss."""
    found = program("inspect")
    collectives, buckets = found["collectives"], found["bucket_sizes"]
    assert sorted(collectives["all-gather"]) == buckets
    assert sorted(8 * size for size in collectives["reduce-scatter"]) == buckets
    assert max(collectives["all-reduce"]) <= 12 < max(buckets)  # 3 layers of 4 classes
    assert collectives["all-to-all"] == collectives["collective-permute"] == []


def test_each_device_orthogonalizes_only_its_own_matrices():
    """69 matrices, padded: an eighth would be 8.6 per device; 3 layers of 8 experts make 4 pools."""
    found = program("inspect")
    assert found["newton_schulz_flops"] == found["planned_flops"]
    assert found["planned_flops"] < found["replicated_flops"] / 4


def test_gradients_are_reduced_in_float32():
    found = program("inspect")
    assert found["gradients"] == {"f32": found["buckets"]}
    assert found["gradients, bfloat16"] == {"f32": found["buckets"]}


def test_devices_that_share_experts_train_as_those_that_do_not():
    """Two nodes of four and four of two; 3 experts and odd numbers of all matrices; float32."""
    for found in program("nodes").values():
        assert found.pop("router_counts_LX") == 0
        assert all(error < 1e-5 for error in found.values()), found


@pytest.mark.slow
def test_a_run_resumes_with_shared_and_unshared_experts():
    found = program("across_nodes")
    assert all(error < 1e-5 for error in found.values()), found


@pytest.mark.slow
def test_adapters_of_shared_experts_train_as_those_of_plain_ones():
    """AdamW divides by gradients, some of which are rounding noise, also without sharing."""
    found = program("adapters_of_experts")
    assert found["shared"] < max(1e-5, 3 * found["plain"]), found


@pytest.mark.slow
def test_eight_devices_train_adapters_as_one():
    """Each has an eighth of the frozen weights, which do not change; only trained weights are summed."""
    found = program("adapters")
    assert found["moved"] > 1e-2
    assert found["eight and one"] < 1e-5
    assert found["resumed on one"] < 1e-5
    assert found["frozen moved"] == 0
    assert found["reduced"] == found["trained"]
    assert found["frozen"] / 8 <= found["frozen held"] < found["frozen"] / 8 + 40  # padding, one per weight


def test_experts_gathered_by_layer_equal_those_of_their_owners():
    """Sums have the same order, so the bits are equal, except with three nodes or more."""
    found = run_program("experts_by_layer.py")
    assert found.pop("small terms") == 0
    assert all(error == 0 for case, error in found.items() if case.startswith("gathered")), found
    assert all(error < 1e-6 for error in found.values()), found


def test_weights_are_read_outside_jit_by_one_program_each():
    """Several collective programs at once can deadlock on threads until XLA ends the process."""
    for name, found in run_program("weights_of_a_state.py").items():
        assert found["programs"] == [1, 2], (name, found)
        assert found["error"] < 1e-6, (name, found)

"""Training on eight devices equals training on one device."""

import pytest
from programs import program as run_program


def program(what, *arguments):
    # Without the compilation cache, whose programs have the scope names of their first writer.
    return run_program("eight_devices_and_one.py", what, *arguments, keeps_programs=what != "inspect")


@pytest.mark.slow
def test_eight_devices_train_as_one():
    actual = program("compare")
    assert actual["devices"] == 8
    assert actual["tokens"] == [3 * 200] * 12  # three layers; padding does not count
    assert actual["moved"] > 1e-2
    assert all(error < 1e-5 for error in actual["eight and one"].values()), actual


@pytest.mark.campaign
def test_a_checkpoint_of_eight_devices_is_resumed_on_two():
    """tests/multiprocess/test_runs.py resumes on fewer processes."""
    assert all(error < 1e-5 for error in program("resume").values())


@pytest.mark.slow
def test_averages_of_weights_equal_float64_on_one_and_eight_devices():
    """Twelve updates, each with three roundings to half of 2**-23."""
    found = program("compare")["averages"]
    assert found.pop("average and weights") > 1e-3
    assert found["one"] < 12 * 3 * 2.0**-24
    assert found["eight"] < 12 * 3 * 2.0**-24
    assert found["eight and one"] < 1e-5


def test_gradients_are_reduce_scattered_and_weights_all_gathered():
    """Each part once; only a few values are summed over all devices: norms, counts and the loss."""
    actual = program("inspect")
    collectives, buckets = actual["collectives"], actual["bucket_sizes"]
    assert sorted(collectives["all-gather"]) == buckets
    assert sorted(8 * size for size in collectives["reduce-scatter"]) == buckets
    assert max(collectives["all-reduce"]) <= 12 < max(buckets)  # 3 layers of 4 classes
    assert collectives["all-to-all"] == collectives["collective-permute"] == []


def test_each_device_orthogonalizes_only_its_own_matrices():
    """69 matrices, padded: an eighth would be 8.6 per device; 3 layers of 8 experts make 4 pools."""
    actual = program("inspect")
    assert actual["newton_schulz_flops"] == actual["planned_flops"]
    assert actual["planned_flops"] < actual["replicated_flops"] / 4


def test_gradients_are_reduced_in_float32():
    actual = program("inspect")
    assert actual["gradients"] == {"f32": actual["buckets"]}
    assert actual["gradients, bfloat16"] == {"f32": actual["buckets"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "2,2,group",
        pytest.param("4,1,products", marks=pytest.mark.campaign),
        pytest.param("8,1,none", marks=pytest.mark.campaign),
    ],
)
def test_devices_that_share_experts_train_as_those_that_do_not(layout):
    """Nodes of two, four and eight devices; 3 experts and odd numbers of all matrices; float32."""
    for actual in program("nodes", layout).values():
        assert actual.pop("router_counts_LX") == 0
        assert all(error < 1e-5 for error in actual.values()), actual


@pytest.mark.campaign
def test_a_run_resumes_with_shared_and_unshared_experts():
    actual = program("across_nodes")
    assert all(error < 1e-5 for error in actual.values()), actual


@pytest.mark.campaign
def test_switches_of_muon_train_and_resume_on_any_devices():
    """The mean squares of neurons and the norms of matrices need sums over the devices of a node."""
    actual = program("switches")
    assert actual.pop("trained") > 1e-2
    assert all(error < 1e-5 for error in actual.values()), actual


@pytest.mark.campaign
def test_adapters_of_shared_experts_train_as_those_of_plain_ones():
    """AdamW divides by gradients, some of which are rounding noise, also without sharing."""
    actual = program("adapters_of_experts")
    assert actual["shared"] < max(1e-5, 3 * actual["plain"]), actual


@pytest.mark.campaign
def test_eight_devices_train_adapters_as_one():
    """Each has an eighth of the frozen weights, which do not change; only trained weights are summed."""
    actual = program("adapters")
    assert actual["moved"] > 1e-2
    assert actual["eight and one"] < 1e-5
    assert actual["resumed on one"] < 1e-5
    assert actual["frozen moved"] == 0
    assert actual["reduced"] == actual["trained"]
    assert (
        actual["frozen"] / 8 <= actual["frozen held"] < actual["frozen"] / 8 + 40
    )  # padding, one per weight


def test_experts_gathered_by_layer_equal_those_of_their_owners():
    """Sums have the same order, so the bits are equal, except with three nodes or more."""
    actual = run_program("experts_by_layer.py")
    assert actual.pop("small terms") == 0
    assert all(error == 0 for case, error in actual.items() if case.startswith("gathered")), actual
    assert all(error < 1e-6 for error in actual.values()), actual


def test_weights_are_read_outside_jit_by_one_program_each():
    """Several collective programs at once can deadlock on threads until XLA ends the process."""
    for name, actual in run_program("weights_of_a_state.py").items():
        assert actual["programs"] == [1, 2], (name, actual)
        assert actual["error"] < 1e-6, (name, actual)

"""The benchmark of kernels checks what it compares, and counts the work correctly."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.catalogue import SIZES, Work, cases
from zaya_jax.bench.kernels.kernel_times import Ceilings, compare, difference, passes
from zaya_jax.bench.kernels.other_libraries import OTHERS, others

CASE = next(case for case in cases(SIZES["toy"]) if case.name == "residual_rms_norm")
CEILINGS = Ceilings(flops=1e12, bandwidth=1e9)


def test_a_kernel_is_timed_with_and_without_its_gradients():
    result = passes(CASE, CASE.make(jax.random.key(0)))
    assert [name for name, _, _ in result] == ["forward", "gradients"]
    for _, calls, work in result:
        rows = compare(CASE, calls, work, CEILINGS, rounds=1)
        assert [row[0] for row in rows] == ["pallas", "xla"]
        assert float(rows[0][-1]) == 0
        assert 0 <= float(rows[1][-1]) < 0.02  # rounded to bfloat16 after sums in another order


def test_a_wrong_result_is_an_error():
    calls = {"ours": lambda: jnp.ones(4), "theirs": lambda: jnp.ones(4) * 1.1}
    with pytest.raises(ValueError, match="residual_rms_norm: results differ from the kernel's: theirs by 1"):
        compare(CASE, calls, Work(1, 1), CEILINGS, rounds=1)


def test_the_largest_relative_difference_is_returned():
    expected = {"a": jnp.array([3.0, 4.0]), "b": jnp.zeros(2)}
    assert difference({"a": jnp.array([3.0, 4.5]), "b": jnp.zeros(2)}, expected) == pytest.approx(0.1)
    assert difference({"a": expected["a"], "b": jnp.array([0.0, 0.2])}, expected) == pytest.approx(0.2)


def test_results_that_a_library_does_not_return_are_not_compared():
    expected = (jnp.ones(2), jnp.ones(3), jnp.array([3.0, 4.0]))
    assert difference((jnp.ones(2), None, jnp.array([3.0, 4.5])), expected) == pytest.approx(0.1)
    assert difference((jnp.ones(2),), expected) == 0


@pytest.mark.parametrize("operation", OTHERS)
def test_installed_libraries_return_the_same(operation):
    case = next(case for case in cases(SIZES["toy"]) if case.name == operation)
    arguments, xla = case.make(jax.random.key(0)), case.implementations[1]
    here = [other for other in others(operation) if not other.absent]
    for other in here:
        forward, gradients = other.make(*arguments)
        assert difference(forward(), case.function(*arguments, implementation=xla)) < case.tolerance
        if gradients is not None:
            assert difference(gradients(), case.with_gradients(xla)(*arguments)) < case.tolerance
    if importlib.util.find_spec("torch"):
        assert any(other.name.startswith("torch") for other in here)


def test_a_missing_library_is_named_with_the_reason(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    absent = {other.name: other.absent for other in others("flash_attention")}
    assert absent == {
        "cuDNN (jax.nn)": "it has none for cpu",
        "jax.nn": "",
        "torch SDPA": "torch is not installed",
        "tokamax": "tokamax is not installed",
    }


def test_the_share_of_peak_is_of_the_limiting_resource():
    assert CEILINGS.share(Work(flops=10**12, num_bytes=10**6), seconds=2.0) == 0.5
    assert CEILINGS.share(Work(flops=10**6, num_bytes=10**9), seconds=4.0) == 0.25


def test_every_operation_is_in_the_catalogue_at_every_size():
    for sizes in SIZES.values():
        result = cases(sizes)
        assert len({case.name for case in result}) == len(result) == 10
        for case in result:
            arguments = jax.eval_shape(case.make, jax.random.key(0))
            results = jax.eval_shape(case.with_gradients("pallas"), *arguments)
            assert jax.tree.leaves(results)
            if case.num_differentiated:
                gradients = results[1]
                differentiated = arguments[: case.num_differentiated]
                assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, differentiated)

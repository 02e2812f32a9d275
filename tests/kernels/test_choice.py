"""What `implementation=None` means, and that it says what it rests on."""

import logging

import jax
import pytest

from pallas_kernels import choice
from pallas_kernels.catalogue import SIZES, cases
from pallas_kernels.choice import TABLE, choice_for, choose

OPERATIONS = [case.name for case in cases(SIZES["toy"])]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_cpu_takes_no_kernel(operation):
    assert choice_for(operation, "cpu").implementation == "xla"


@pytest.mark.parametrize("platform", ["rocm", "cuda"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_was_not_measured_says_so(operation, platform):
    assert choice_for(operation, platform).basis.startswith("unmeasured: ")


def test_the_table_names_operations():
    assert {operation for operation, _ in TABLE} <= set(OPERATIONS)


def test_a_name_is_taken_as_it_is():
    assert [choose("flash_attention", name) for name in ("pallas", "xla")] == ["pallas", "xla"]
    with pytest.raises(ValueError, match='flash_attention: implementation is "cuda"; it must be "pallas"'):
        choose("flash_attention", "cuda")


def test_a_choice_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "rocm")
    choice._of_platform.cache_clear()
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        assert [choose("flash_attention", None) for _ in range(3)] == ["pallas"] * 3
    choice._of_platform.cache_clear()
    (record,) = caplog.records
    assert record.getMessage().startswith("flash_attention on rocm: pallas (unmeasured: ")

"""Which implementation `implementation=None` selects, and the evidence that is reported for it."""

import functools
import logging
import re
import types

import jax
import pytest

from pallas_kernels import choice, flash_attention
from pallas_kernels.catalogue import SIZES, cases
from pallas_kernels.choice import IMPLEMENTATIONS, TABLE, WIDEST, choice_for, choose, platform_of

OPERATIONS = [case.name for case in cases(SIZES["toy"])]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_cpu_uses_no_kernel(operation):
    assert choice_for(operation, "cpu").implementation == "xla"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_choice_says_whether_it_was_measured(operation):
    assert choice_for(operation, "rocm").basis.startswith("unmeasured: ")
    assert re.match(r"measured on one H200.* [\d.]+ ms, ", choice_for(operation, "cuda").basis)


def test_an_unknown_platform_uses_no_kernel():
    assert choice_for("cca", "oneapi") == choice.UNMEASURED
    assert choice.UNMEASURED.implementation == "xla"


def test_the_table_names_existing_operations_and_implementations():
    for (case, _), entry in TABLE.items():
        operation = case.removesuffix(" of few rows")
        assert operation in OPERATIONS
        assert entry.implementation in IMPLEMENTATIONS[operation]
    assert set(IMPLEMENTATIONS) == {name.removesuffix(" of few rows") for name in OPERATIONS}


def test_the_grouped_product_is_split_by_direction_and_never_the_vendor_s_for_decoding():
    choose_on_rocm = functools.partial(choose, "grouped_matmul", None, platform="rocm")
    assert choose_on_rocm() == "ragged_dot+pallas"
    assert choose_on_rocm(has_few_rows=True) == "pallas"
    assert choose("grouped_matmul", None, platform="cpu", has_few_rows=True) == "xla"


def test_a_missing_vendor_package_is_an_error():
    sentence = 'grouped_matmul: implementation is "primus_turbo", which needs the package primus_turbo, and'
    with pytest.raises(ValueError, match=sentence):
        choose("grouped_matmul", "primus_turbo")


def test_a_named_implementation_is_used():
    assert [choose("flash_attention", name) for name in ("pallas", "xla")] == ["pallas", "xla"]
    with pytest.raises(ValueError, match='flash_attention: implementation is "cuda"; it must be "pallas"'):
        choose("flash_attention", "cuda")


@pytest.mark.parametrize(("operation", "widest"), WIDEST.items())
def test_none_selects_no_kernel_for_unsupported_sizes(operation, widest, monkeypatch):
    monkeypatch.setitem(TABLE, (operation, "rocm"), choice.Choice("pallas", "for this test"))
    choice._of_platform.cache_clear()
    found = [choose(operation, None, platform="rocm", width=width) for width in (widest, widest + 1)]
    choice._of_platform.cache_clear()
    assert found == ["pallas", "xla"]


def test_supported_head_widths():
    assert max(flash_attention.BLOCKS) == WIDEST["flash_attention"]


def test_the_platform_of_a_device():
    def device(platform, version, kind):
        client = types.SimpleNamespace(platform_version=version)
        return types.SimpleNamespace(platform=platform, client=client, device_kind=kind)

    assert platform_of(jax.devices("cpu")[0]) == "cpu"
    assert platform_of(device("gpu", "PJRT C API\nrocm 70000", "gfx942")) == "rocm"
    described = "AMD Instinct MI300X"  # an abstract device
    assert platform_of(device("gpu", f"PJRT C API\n{described}", described)) == "rocm"
    assert platform_of(device("gpu", "PJRT C API\ncuda 12090", "NVIDIA H200")) == "cuda"


def test_a_choice_is_reported_once(caplog):
    choice._of_platform.cache_clear()
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        found = [choose("flash_attention", None, platform="rocm") for _ in range(3)]
    assert found == ["pallas"] * 3
    choice._of_platform.cache_clear()
    (record,) = caplog.records
    assert record.getMessage().startswith("flash_attention on rocm: pallas (unmeasured: ")

"""Peak FLOP/s by JAX's device names; the expected values are dense TFLOP/s of the vendors' data sheets."""

import pytest

from zaya_jax.plan.gpus import DEVICES
from zaya_jax.platform.peak_flops import PEAK_FLOPS, peak_flops

DENSE = {
    "AMD Instinct MI355X": 2516.6,
    "AMD Instinct MI350X": 2306.9,
    "AMD Instinct MI325X": 1307.4,
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI300X OAM": 1307.4,
    "AMD Instinct MI300A": 980.6,
    "AMD Instinct MI250X": 191.5,
    "AMD Instinct MI250X/MI250": 191.5,
    "AMD Instinct MI250X / MI250": 191.5,
    "AMD Instinct MI250": 181.05,
    "AMD Instinct MI210": 181.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA B200": 2250.0,
    "NVIDIA GB200": 2500.0,
    "NVIDIA B300 SXM6 AC": 2250.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
}
UNKNOWN = (
    "cpu",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA GeForce RTX 4090",
    "AMD Instinct MI100",
    "NVIDIA A1000",
    "AMD Instinct MI300",
    "TPU v4",
    "",
)


@pytest.mark.parametrize("kind", DENSE)
def test_peak_of_a_known_device(kind):
    assert peak_flops(kind) == pytest.approx(DENSE[kind] * 1e12, rel=1e-12)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_devices_have_no_peak(kind):
    assert peak_flops(kind) is None


def test_a_name_precedes_those_that_it_contains():
    names = list(PEAK_FLOPS)
    for i, name in enumerate(names):
        assert not any(f"{earlier} " in f"{name} " for earlier in names[:i]), name


@pytest.mark.parametrize("name", DEVICES)
def test_plans_use_the_same_peaks(name):
    assert DEVICES[name].matrix_flops == peak_flops(name.upper())

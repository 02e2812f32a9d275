"""Peak dense bfloat16 FLOP/s of devices, from the data sheets of the vendors.

If a data sheet only has a figure with 2:4 sparsity, the value here is half of it. JAX counts each of the two
dies (GCDs) of an MI250 card as a device, with half of the peak of the card.
"""

import re

PEAK_FLOPS = {
    "MI355X": 2516.6e12,  # AMD Instinct MI355X data sheet, 2025: 2.5 PFLOPS, 5.03 with sparsity
    "MI350X": 2306.9e12,  # AMD Instinct MI350X data sheet, 2025: 2.3 PFLOPS, 4.6 with sparsity
    "MI325X": 1307.4e12,  # AMD Instinct MI325X data sheet, 2024
    "MI300X": 1307.4e12,  # AMD Instinct MI300X data sheet, 2023
    "MI300A": 980.6e12,  # AMD Instinct MI300A data sheet, 2023
    "MI250X": 383.0e12 / 2,  # AMD Instinct MI200 series data sheet, 2021: a card; two GCDs
    "MI250": 362.1e12 / 2,  # the same: a card; two GCDs
    "MI210": 181.0e12,  # AMD Instinct MI210 data sheet, 2022: one GCD
    "GB300": 2500e12,  # NVIDIA GB300 NVL72, 2025: 360 PFLOPS with sparsity for 72 GPUs
    "GB200": 2500e12,  # NVIDIA GB200 NVL72, 2024: 360 PFLOPS with sparsity for 72 GPUs
    "B300": 2250e12,  # NVIDIA HGX B300, 2025: 36 PFLOPS with sparsity for 8 GPUs
    "B200": 2250e12,  # NVIDIA HGX B200, 2024: 36 PFLOPS with sparsity for 8 GPUs
    "GH200": 989.4e12,  # NVIDIA GH200 data sheet, 2023: 1,979 with sparsity, as H100 SXM
    "H200 NVL": 835.5e12,  # NVIDIA H200 data sheet, 2024: 1,671 with sparsity
    "H200": 989.4e12,  # the same, SXM: 1,979 with sparsity
    "H100 NVL": 835.5e12,  # NVIDIA H100 NVL product brief, 2024: 1,671 with sparsity
    "H100 PCIe": 756.5e12,  # NVIDIA H100 data sheet, 2022: 1,513 with sparsity
    "H100": 989.4e12,  # the same, SXM: 1,979 with sparsity
    "A100": 312e12,  # NVIDIA A100 data sheet, 2020
}
"""Peak in FLOP/s by a part of the device's name; the first match counts."""


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak dense bfloat16 performance of a device.

    Args:
      device_kind: value of `jax.Device.device_kind`, such as "AMD Instinct MI300X" or "NVIDIA H100 80GB
        HBM3".

    Returns:
      FLOP/s; None if unknown: for CPUs, other GPUs, and MIG instances, which are parts of a GPU.
    """
    if re.search(r"\bMIG\b", device_kind):
        return None
    return next((peak for name, peak in PEAK_FLOPS.items() if _has(device_kind, name)), None)


def _has(device_kind: str, name: str) -> bool:
    # Match whole words, so that "MI250" does not match a name such as "MI250X".
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", device_kind) is not None

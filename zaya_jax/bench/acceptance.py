"""`python -m zaya_jax.bench.acceptance`: AMD's acceptance measurements of a node, as a line of JSON for the
doctor.

The doctor runs it in a separate process that it can kill, because each of the three measurements may hang on
a faulty node.
"""

import json

import jax

from zaya_jax.bench.collectives.collectives import Sweep, measure_sizes
from zaya_jax.bench.collectives.device_groups import DeviceGroups
from zaya_jax.bench.kernels.gemm import ACCEPTED, product_times
from zaya_jax.bench.kernels.memory_passes import TRAFFIC, pass_time
from zaya_jax.plan.arithmetic import Gemm
from zaya_jax.plan.measured import ALL

ARRAY_BYTES = 2**32
MESSAGE_BYTES = 2**33 - 2**20
"""Nearly 8 GiB, the size for which AMD states its minimum. The number of float32 values must fit 32 bits."""


def main() -> None:
    """Measures the devices of this process and prints the result for the doctor."""
    print(json.dumps(measure(ACCEPTED, array_bytes=ARRAY_BYTES, message_bytes=MESSAGE_BYTES)))


def measure(product: Gemm, *, array_bytes: int, message_bytes: int) -> dict[str, float | None]:
    """Returns the fields of `zaya_jax.aegis.doctor.facts.Speed`: the slowest device, and the all-reduce of
    all devices.

    Args:
      product: matrix product that each device computes.
      array_bytes: size of the arrays of the memory passes.
      message_bytes: size of the all-reduce; with a single device it is not measured.
    """
    # One device after the other: the slowest one decides, and its time must not include waiting for others.
    rates, bandwidths = [], []
    for device in jax.local_devices():
        with jax.default_device(device):
            # bfloat16, the dtype of AMD's acceptance figures.
            rates.append(product_times([product], "bfloat16")[0].rate)
            bandwidths.append(max(pass_time(operation, array_bytes).bandwidth for operation in TRAFFIC))
    return {
        "gemm_flops": min(rates),
        "memory_bandwidth": min(bandwidths),
        "all_reduce_bandwidth": _all_reduce(message_bytes),
    }


def _all_reduce(message_bytes: int) -> float | None:
    devices = jax.local_devices()
    if len(devices) == 1:
        return None
    # AMD accepts a node by its all-reduce over all GPUs, so no smaller groups are measured.
    grouping = DeviceGroups(ALL, (tuple(range(len(devices))),))
    (timing,) = measure_sizes(grouping, devices, "all_reduce", [message_bytes], Sweep())
    return timing.bus_bandwidth


if __name__ == "__main__":
    main()

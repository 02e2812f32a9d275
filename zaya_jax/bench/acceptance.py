"""`python -m zaya_jax.bench.acceptance`: what AMD accepts a node by, as a line of JSON for the doctor.

In a process of its own, which can be ended: a node that is not well may hang in any of the three.
"""

import json

import jax

from zaya_jax.bench.collectives import Sweep, measure_sizes
from zaya_jax.bench.groupings import DeviceGroups
from zaya_jax.bench.memory_passes import TRAFFIC, pass_time
from zaya_jax.bench.products import ACCEPTED, product_times
from zaya_jax.plan.arithmetic import Gemm
from zaya_jax.plan.measured import ALL

ARRAY_BYTES, MESSAGE_BYTES = 2**32, 2**30


def main() -> None:
    """Measures this process' devices, and prints what the doctor reads."""
    print(json.dumps(measure(ACCEPTED, array_bytes=ARRAY_BYTES, message_bytes=MESSAGE_BYTES)))


def measure(product: Gemm, *, array_bytes: int, message_bytes: int) -> dict[str, float | None]:
    """Fields of `zaya_jax.aegis.readings.Speed`: of the slowest device, and of all together.

    Args:
      product: that each device makes.
      array_bytes: of the arrays that each passes over.
      message_bytes: of the all-reduce; of one device there is none.
    """
    rates, bandwidths = [], []
    for device in jax.local_devices():
        with jax.default_device(device):
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
    grouping = DeviceGroups(ALL, (tuple(range(len(devices))),))
    (timing,) = measure_sizes(grouping, devices, "all_reduce", [message_bytes], Sweep())
    return timing.bus_bandwidth


if __name__ == "__main__":
    main()

"""Sums over four devices that gloo connects, next to other collectives; prints how many calls were wrong."""

import os

import jax
import numpy as np

from zaya_jax.parallel.mesh import (
    ALL,
    REPLICATED,
    SHARDED,
    all_gather,
    data_mesh,
    on_each_device,
    reduce_scatter,
)
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.process_group import find_process_group

NUM_CALLS, SIZES = 100, ((64, 512), (1024, 64), (2048, 32))


def collectives(arrays):
    # A gather follows each sum, and may write where the sum is still being read.
    return [(reduce_scatter(x), all_gather(x[:4]), jax.lax.psum(x[0], ALL)) for x in arrays]


def main() -> None:
    group = find_process_group(os.environ)
    assert group is not None
    hosts.start(group, limit_seconds=60)
    random = np.random.default_rng(0)
    # Whole numbers, whose sums are exact in any order.
    arrays = [random.integers(-99, 99, (4 * rows, columns)).astype(np.float32) for rows, columns in SIZES]
    expected = [x.reshape(4, -1, x.shape[1]).sum(axis=0) for x in arrays]
    run = jax.jit(
        on_each_device(
            collectives,
            mesh=data_mesh(),
            in_specs=([SHARDED] * len(SIZES),),
            out_specs=[(SHARDED, REPLICATED, REPLICATED)] * len(SIZES),
        )
    )
    results = [[np.asarray(sums) for sums, *_ in run(arrays)] for _ in range(NUM_CALLS)]
    wrong = sum(any((a != b).any() for a, b in zip(each, expected, strict=True)) for each in results)
    print(f"{wrong} of {NUM_CALLS} calls were wrong", flush=True)


main()

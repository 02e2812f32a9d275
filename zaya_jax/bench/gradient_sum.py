"""`zaya bench gradient-sum`: what of a gradient is left when 1,024 devices add theirs up, by type.

A reduce-scatter hands a sum on from device to device, and the library that does it (RCCL) rounds at each
hop to the type that it was given. Simulated here, because XLA's CPU backend sums in float32 whatever
it is asked. A device's gradient is what all devices have in common plus noise of its own, early in training
little and later much.

Letters: N devices, P elements.
"""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from zaya_jax.options import load_config
from zaya_jax.plan.arithmetic import communication, with_node_devices
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import MI300X

BFLOAT16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
NUM_DEVICES, NODE = 1024, 8
NUM_ELEMENTS = 1 << 14
NOISES = (0.0, 1.0, 10.0, 100.0)
"""Of a device's gradient, over what all have in common; root mean squares."""
PRESET = "configs/zaya1_8b.py"


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to sum, and the bytes that it takes over those of a ring in bfloat16."""

    name: str
    total: Callable[[np.ndarray], np.ndarray]
    bytes_ratio: float


def ring(gradients_NP: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The sum over devices, rounded to a type at each hop."""
    total_P = gradients_NP[0].astype(dtype)
    for gradient_P in gradients_NP[1:]:
        total_P = (total_P.astype(FLOAT32) + gradient_P.astype(dtype).astype(FLOAT32)).astype(dtype)
    return total_P


def by_node(gradients_NP: np.ndarray, within: np.dtype, between: np.dtype) -> np.ndarray:
    """The sum over each node first, in one type, and over the nodes in another."""
    nodes = np.split(gradients_NP, len(gradients_NP) // NODE)
    return ring(np.stack([ring(node, within) for node in nodes]), between)


def by_owners(gradients_NP: np.ndarray, between: np.dtype) -> np.ndarray:
    """Sums of each node in float32, and of these, rounded once, over the nodes in float32 too."""
    nodes = gradients_NP.reshape(-1, NODE, gradients_NP.shape[1]).astype(FLOAT32).sum(axis=1)
    return nodes.astype(between).astype(FLOAT32).sum(axis=0)


WAYS = (
    Way("bfloat16, one ring", lambda x_NP: ring(x_NP, BFLOAT16), 1.0),
    Way("bfloat16, each node first", lambda x_NP: by_node(x_NP, BFLOAT16, BFLOAT16), 1.0),
    Way("float32 in the node, bfloat16 between", lambda x_NP: by_node(x_NP, FLOAT32, BFLOAT16), 1.0),
    Way("float32, one ring: the step's own", lambda x_NP: ring(x_NP, FLOAT32), 2.0),
    Way("float32 by owners: its own of nodes", lambda x_NP: by_owners(x_NP, BFLOAT16), 1.0),
)


def lost_share(way: Way, noise: float, *, num_devices: int = NUM_DEVICES, seed: int = 0) -> float:
    """Norm of what a sum of bfloat16 gradients differs from the exact one by, over the exact one's.

    Args:
      way: to sum.
      noise: of each device, over what all have in common.
      num_devices: N.
      seed: of the gradients.
    """
    random = np.random.default_rng(seed)
    common_P = random.standard_normal(NUM_ELEMENTS)
    own_NP = random.standard_normal((num_devices, NUM_ELEMENTS))
    gradients_NP = (common_P + noise * own_NP).astype(BFLOAT16)
    exact_P = gradients_NP.astype(np.float64).sum(axis=0)
    found_P = way.total(gradients_NP).astype(np.float64)
    return float(np.linalg.norm(found_P - exact_P) / np.linalg.norm(exact_P))


def run(console: Console | None = None) -> None:
    """Prints what each way loses, and what float32 costs the step of the 8B recipe on 128 x 8 MI300X."""
    console = console or Console(soft_wrap=True, highlight=False)
    title = f"sum of {NUM_DEVICES:,} devices' bfloat16 gradients: % of it that is lost"
    table = Table("summed in", *(f"noise {noise:g}" for noise in NOISES), "bytes", title=title)
    for way in WAYS:
        lost = (f"{100 * lost_share(way, noise):.2g}" for noise in NOISES)
        table.add_row(way.name, *lost, f"{way.bytes_ratio:g} x")
    console.print(table)
    console.print(describe_cost())


def describe_cost() -> str:
    """What summing in float32 costs the 8B recipe beside bfloat16, by arithmetic."""
    config = with_node_devices(load_config(PRESET, []), 1)
    cluster = Cluster(device=MI300X, nodes=NUM_DEVICES // NODE, gpus_per_node=NODE)
    wide, narrow = (communication(config, cluster, reduced_dtype=dtype) for dtype in ("float32", "bfloat16"))
    return (
        f"{PRESET} on {cluster.nodes} x {NODE} MI300X, no experts shared, sums in float32: "
        f"{wide.reduced_bytes / 1e9:.1f} GB a GPU and step, in bfloat16 {narrow.reduced_bytes / 1e9:.1f}; "
        f"{1e3 * (wide.network_seconds - narrow.network_seconds):.1f} ms more of the network and "
        f"{1e3 * (wide.link_seconds - narrow.link_seconds):.1f} ms more of the links in the node, at least"
    )

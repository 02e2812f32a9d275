"""`python -m zaya_jax.plan.rocm.worker PIPE FOLDER`: compiles one program for a described cluster.

It is a separate process because ordinary programs must not find the plugin, which may also abort and keeps
memory. It receives a `Job` of `zaya_jax.plan.rocm.compiler` through PIPE, a file descriptor, and sends the
fields of its `Compilation`.
"""

import ctypes
import importlib
import pathlib
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import jax
from jax.experimental import topologies

from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.rocm.code_objects import read_kernels
from zaya_jax.plan.rocm.compiler import REPORT, Job, Memory
from zaya_jax.plan.rocm.stub_libraries import build_stubs
from zaya_jax.plan.rocm.wheels import Plugin, find_plugin

PLATFORM = "rocm"


def register(plugin: Plugin, folder: pathlib.Path) -> None:
    """Registers the plugin with jax as a compiler; the CPU stays the default backend."""
    from jax._src import xla_bridge  # plugins register through it; there is no public API
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    jax.devices()  # jax searches for plugins now, before it can find this one
    if plugin.folder is not None:
        sys.path.append(str(plugin.folder))  # Pallas lowers Triton kernels with code from it
    for library in build_stubs(plugin.library, folder):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # the plugin's loader finds it by its soname
    options: Any = xla_client.generate_pjrt_gpu_plugin_options()
    # The negative priority below keeps the CPU the default backend.
    options["platform_name"] = "ROCM"
    xla_bridge.register_plugin(PLATFORM, priority=-1, library_path=str(plugin.library), options=options)


def describe_devices(cluster: Cluster) -> list[Any]:
    """Returns abstract devices of a cluster: programs can be compiled for them, but not run."""
    return list(
        topologies.get_topology_desc(
            platform=PLATFORM,
            topology_name=cluster.device.name,
            target_config=cluster.device.need_core().target,
            # XLA's notation: partitions of the cluster, hosts of a partition, GPUs of a host.
            topology=f"1x{cluster.nodes}x{cluster.gpus_per_node}",
        ).devices
    )


def make_devices(cluster: Cluster, folder: pathlib.Path) -> list[Any]:
    """Returns abstract devices, and registers the plugin unless a real ROCm backend exists."""
    try:
        devices = describe_devices(cluster)
    except NotImplementedError:  # raised by jax for an unregistered platform
        register(find_plugin(), folder)
        devices = describe_devices(cluster)
    _tell_architecture(devices[0].device_kind, cluster.device.need_core().architecture)
    return devices


def _tell_architecture(device_kind: str, architecture: str) -> None:
    """Tells Pallas the architecture of a described GPU.

    Since jax 0.11 Pallas asks an AMD GPU for its architecture, but a described one has only the name of the
    product. XLA selects kernels by that name, so the description keeps it.
    """
    try:
        from jax._src.pallas.triton import gpu_info  # pyright: ignore[reportAttributeAccessIssue] (no public API)
    except ImportError:  # before jax 0.11, where Pallas needs no architecture
        return
    info = gpu_info.GpuInfo(gpu_version=None, arch_name=architecture, compute_capability=0)
    gpu_info.registry.setdefault(device_kind, lambda: info)


def compile_job(job: Job, folder: pathlib.Path) -> dict[str, Any]:
    """Compiles a program, and returns all fields of its `Compilation` that this process knows.

    Args:
      job: program and cluster.
      folder: folder for the files of XLA, which has its code objects in `code`.
    """
    devices = make_devices(job.cluster, folder)
    module, _, function = job.program.partition(":")
    lowered = getattr(importlib.import_module(module), function)(devices, **job.arguments)
    traced = time.monotonic()
    dump = folder / "dump"
    # The dump contains the memory report and the launch sizes, which no API returns.
    compiled = lowered.compile(compiler_options={"xla_dump_to": str(dump)} | job.compiler_options)
    finished = time.monotonic()
    # XLA writes a report per module; the largest one is the train step's.
    reports = sorted(dump.glob(f"*{REPORT}"), key=lambda path: path.stat().st_size)
    return {
        "memory": Memory.of(compiled),
        "kernels": tuple(read_kernels(folder / "code", dump)),
        "hlo": compiled.as_text(),
        "buffers": reports[-1].read_text() if reports else "",
        "compile_seconds": finished - traced,
    }


if __name__ == "__main__":
    pipe = Connection(int(sys.argv[1]))
    pipe.send(compile_job(pipe.recv(), pathlib.Path(sys.argv[2])))

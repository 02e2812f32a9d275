"""`python -m zaya_jax.plan.rocm.worker FOLDER`: compiles one program for a described cluster.

A process of its own, because the plugin must not be found by ordinary programs, may abort, and holds
memory. FOLDER has job.json, from `zaya_jax.plan.rocm.compiler`; result.json is written into it.
"""

import ctypes
import dataclasses
import importlib
import json
import pathlib
import sys
import time
from typing import Any

import jax
from jax.experimental import topologies

from zaya_jax.plan.devices import Cluster, find_device
from zaya_jax.plan.rocm.code_objects import read_kernels
from zaya_jax.plan.rocm.stand_ins import build_stand_ins
from zaya_jax.plan.rocm.wheels import Plugin, find_plugin

PLATFORM = "rocm"


def register(plugin: Plugin, folder: pathlib.Path) -> None:
    """Gives jax the plugin as a compiler; the CPU stays its backend."""
    from jax._src import xla_bridge  # what plugins register themselves with; there is no public way
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    jax.devices()  # jax looks for plugins now, before it could find this one
    if plugin.folder is not None:
        sys.path.append(str(plugin.folder))  # Pallas lowers Triton kernels with a part of it
    for library in build_stand_ins(plugin.library, folder):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # the plugin finds it by its name
    options: Any = xla_client.generate_pjrt_gpu_plugin_options()
    options["platform_name"] = "ROCM"
    xla_bridge.register_plugin(PLATFORM, priority=-1, library_path=str(plugin.library), options=options)


def describe_devices(cluster: Cluster) -> list[Any]:
    """Abstract devices of a cluster: programs can be compiled for them, not run."""
    return list(
        topologies.get_topology_desc(
            platform=PLATFORM,
            topology_name=cluster.device.name,
            target_config=cluster.device.need_core().target,
            topology=f"1x{cluster.nodes}x{cluster.gpus_per_node}",
        ).devices
    )


def make_devices(cluster: Cluster, folder: pathlib.Path) -> list[Any]:
    """As `describe_devices`; the plugin is registered unless a real ROCm did that already."""
    try:
        return describe_devices(cluster)
    except NotImplementedError:  # what jax says of a platform that nobody registered
        register(find_plugin(), folder)
        return describe_devices(cluster)


def main(folder: pathlib.Path) -> None:
    """Compiles the program that the folder's job.json names, and leaves its text and figures there."""
    job = json.loads((folder / "job.json").read_text())
    cluster = Cluster(
        device=find_device(job["device"]), nodes=job["nodes"], gpus_per_node=job["gpus_per_node"]
    )
    devices = make_devices(cluster, folder)
    module, _, function = job["program"].partition(":")
    began = time.monotonic()
    lowered = getattr(importlib.import_module(module), function)(devices, **job["arguments"])
    traced = time.monotonic()
    dump = folder / "dump"
    compiled = lowered.compile(compiler_options={"xla_dump_to": str(dump)} | job["compiler_options"])
    finished = time.monotonic()
    (folder / "program.hlo.txt").write_text(compiled.as_text())
    memory = compiled.memory_analysis()
    result = {
        "trace_seconds": traced - began,
        "compile_seconds": finished - traced,
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
        },
        "kernels": [dataclasses.asdict(kernel) for kernel in read_kernels(folder / "code", dump)],
    }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

"""The doctor's sentences on software: one pure function a thing, from what was read of a host."""

from zaya_jax.aegis.findings import BAD, CLUSTER, GOOD, NODE, SMALL, UNTESTED, WORSE, Finding
from zaya_jax.aegis.readings import Readings

EVERY_USE = (SMALL, NODE, CLUSTER)
ON_GPUS = (NODE, CLUSTER)
FIRST_JAX, FIRST_UNKNOWN_JAX = (0, 10, 2), (0, 13)
FIRST_PYTHON, PYTHON_OF_NEWER_JAX = (3, 11), (3, 12)
FIRST_ROCM, FIRST_ROCM_WITH_POLLARA = (7, 0), (7, 2, 1)
SLOW_ROCM = (7, 14)
"""Its RCCL is slow at 64 to 512 MB on several nodes."""
POLLARA_DRIVER = "ionic"
TRAINING_FLAGS = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_enable_cublaslt=true",
    "--xla_gpu_autotune_level=4",
    "--xla_gpu_all_gather_combine_threshold_bytes=8589934592",
    "--xla_gpu_reduce_scatter_combine_threshold_bytes=8589934592",
    "--xla_gpu_memory_limit_slop_factor=95",
)
"""What AMD's images for training with JAX on MI300X set."""


def version_numbers(version: str) -> tuple[int, ...]:
    """Of "7.2.1-43" it is (7, 2, 1): the numbers that order versions, up to the first that is none."""
    numbers = []
    for part in version.partition("-")[0].partition("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check_python(readings: Readings) -> Finding:
    """Python, of which each jax wants its own."""
    version = readings.versions["python"] or ""
    numbers = version_numbers(version)
    is_good = numbers >= FIRST_PYTHON
    return Finding(
        name="Python",
        state=GOOD if is_good else BAD,
        found=version,
        wanted="3.11 or later; 3.12 for jax 0.11 and later",
        action="" if is_good else "install Python 3.11 or 3.12 and make the environment with it",
        uses=EVERY_USE,
    )


def check_jax(readings: Readings) -> Finding:
    """One of the jax that we know, and its jaxlib."""
    jax, jaxlib = readings.versions["jax"], readings.versions["jaxlib"]
    is_known = jax is not None and FIRST_JAX <= version_numbers(jax) < FIRST_UNKNOWN_JAX
    is_good = (
        is_known and jaxlib is not None and version_numbers(jaxlib)[:3] == version_numbers(jax or "")[:3]
    )
    return Finding(
        name="jax",
        state=GOOD if is_good else BAD,
        found=f"jax {jax}, jaxlib {jaxlib}".replace("None", "not installed"),
        wanted="0.10.2 or later and below 0.13, and a jaxlib of the same version",
        action="" if is_good else "pip install 'jax>=0.10.2,<0.13' takes both",
        uses=EVERY_USE,
    )


def check_devices(readings: Readings) -> Finding:
    """That jax finds devices: all GPUs where there are some, else the CPU."""
    probe, num_gpus = readings.probe, len(readings.gpus)
    found = f"{len(probe.kinds)} x {probe.kinds[0]}" if probe.kinds else probe.failure
    uses, action, state = EVERY_USE, "", GOOD
    if not probe.kinds:
        state, action = BAD, 'run python -c "import jax; print(jax.devices())" and mend what it complains of'
    elif num_gpus and probe.platform == "cpu":
        state, uses = BAD, ON_GPUS
        action = "jax does not see the GPUs: install its ROCm plugin, and unset JAX_PLATFORMS if it says cpu"
    elif len(probe.kinds) < num_gpus:
        state, uses, action = (
            BAD,
            ON_GPUS,
            "unset ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and JAX_LOCAL_DEVICE_IDS",
        )
    return Finding(
        name="devices of jax",
        state=state,
        found=found,
        wanted=f"{num_gpus} GPUs" if num_gpus else "a device",
        action=action,
        uses=uses,
    )


def check_flags(readings: Readings) -> Finding:
    """That XLA knows each of the flags it is given: of one that it does not know, a run dies at its start."""
    given = readings.environment.get("XLA_FLAGS", "")
    refused = readings.probe.unknown_flags
    return Finding(
        name="XLA_FLAGS",
        state=BAD if refused else GOOD,
        found=f"refused: {', '.join(refused)}" if refused else (f"accepted: {given}" if given else "not set"),
        wanted="flags that this XLA knows",
        action="take the refused ones out, or the jax that they were written for" if refused else "",
        uses=EVERY_USE,
    )


def check_training_flags(readings: Readings) -> Finding:
    """On GPUs: whether AMD's flags for training are known, and set."""
    given = readings.environment.get("XLA_FLAGS", "")
    refused = readings.refused_flags or ()
    known = [flag for flag in TRAINING_FLAGS if flag.partition("=")[0].lstrip("-") not in refused]
    missing = [flag for flag in known if flag.partition("=")[0] not in given]
    return Finding(
        name="flags for training",
        state=WORSE if missing else GOOD,
        found=f"{len(known) - len(missing)} of {len(known)} are set, {len(refused)} are unknown to this XLA",
        wanted="those of AMD's images for training, or others that you have measured",
        action=f'set XLA_FLAGS="{" ".join(missing)}"' if missing else "",
        uses=ON_GPUS,
    )


def check_plugin(readings: Readings) -> Finding:
    """On GPUs: jax, its plugin and its runtime are of one version, exactly."""
    jax, plugin, runtime = (readings.versions[name] for name in ("jax", "jax-rocm7-plugin", "jax-rocm7-pjrt"))
    is_good = jax is not None and jax == plugin == runtime
    found = f"jax {jax}, jax-rocm7-plugin {plugin}, jax-rocm7-pjrt {runtime}".replace("None", "not installed")
    return Finding(
        name="ROCm plugin",
        state=GOOD if is_good else BAD,
        found=found,
        wanted="all three, of one version",
        action="" if is_good else "pip install 'zaya_jax[rocm]' takes three that fit",
        uses=ON_GPUS,
    )


def check_rocm(readings: Readings) -> Finding:
    """On GPUs: ROCm 7, which comes with the host or AMD's image and never from PyPI."""
    version = readings.rocm
    numbers = version_numbers(version or "")
    state, action = GOOD, ""
    if numbers < FIRST_ROCM:
        state, action = BAD, "use AMD's image rocm/jax-training, or install ROCm 7 on the host"
    elif numbers[:2] == SLOW_ROCM:
        state = WORSE
        action = (
            "its RCCL is slow at 64 to 512 MB between nodes: look at zaya bench collectives before a long run"
        )
    return Finding(
        name="ROCm",
        state=state,
        found=version or "no /opt/rocm/.info/version",
        wanted="7.0 or later",
        action=action,
        uses=ON_GPUS,
    )


def check_rccl(readings: Readings) -> Finding:
    """On GPUs: the library that collectives go through."""
    version = readings.probe.rccl
    return Finding(
        name="RCCL",
        state=GOOD if version else BAD,
        found=version or "librccl.so.1 cannot be loaded",
        wanted="a version that it tells itself",
        action="" if version else "install ROCm's rccl, or add /opt/rocm/lib to LD_LIBRARY_PATH",
        uses=ON_GPUS,
    )


def check_network_plugin(readings: Readings) -> Finding:
    """On GPUs with AMD's Pollara NICs: RCCL reaches them by a plugin, which newer ROCm has built in."""
    has_pollara = any(nic.driver == POLLARA_DRIVER for nic in readings.nics)
    plugin = readings.environment.get("NCCL_NET_PLUGIN")
    is_built_in = version_numbers(readings.rocm or "") >= FIRST_ROCM_WITH_POLLARA
    is_asked_for = readings.environment.get("RCCL_AINIC_ROCE") == "1"
    state, action = GOOD, ""
    if has_pollara and not plugin and not (is_built_in and is_asked_for):
        state = BAD
        action = (
            "set RCCL_AINIC_ROCE=1"
            if is_built_in
            else "take ROCm 7.2.1 or later, or set NCCL_NET_PLUGIN=librccl-anp.so"
        )
    built_in = f"RCCL_AINIC_ROCE={int(is_asked_for)}, ROCm {readings.rocm}"
    return Finding(
        name="network plugin",
        state=state,
        found=(f"NCCL_NET_PLUGIN={plugin}" if plugin else built_in) if has_pollara else "no Pollara NIC",
        wanted="for Pollara NICs, the plugin that RCCL reaches them by",
        action=action,
        uses=(CLUSTER,),
    )


def check_rdma(readings: Readings) -> Finding:
    """On GPUs: RDMA that was seen working on each NIC. Without it RCCL falls back to TCP, or crashes."""
    tests = readings.rdma
    state, action = GOOD, ""
    if tests is None:
        state, found = UNTESTED, "ibv_rc_pingpong is not installed"
        action = "install ibverbs-utils (rdma-core's tools), and ask again"
    elif not tests:
        state, found = BAD, "no NIC is up to be tested"
        action = "look at the NICs above first"
    elif failed := [test for test in tests if test.megabits is None]:
        state = BAD
        found = "; ".join(f"{test.name}: {test.failure}" for test in failed)
        action = "mend driver, firmware or address of these; until then NCCL_IB_DISABLE=1 takes TCP, slowly"
    else:
        slowest = min(tests, key=lambda test: test.megabits or 0.0)
        found = (
            f"{len(tests)} NICs reach themselves, the least at {slowest.megabits:,.0f} Mbit/s: {slowest.name}"
        )
    return Finding(
        name="RDMA",
        state=state,
        found=found,
        wanted="a test that passed on each NIC",
        action=action,
        uses=(CLUSTER,),
    )

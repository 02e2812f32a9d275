"""Checks of a host's software: one pure function per finding, from the facts about the host."""

from zaya_jax.aegis.doctor.facts import HostFacts
from zaya_jax.aegis.doctor.findings import CLUSTER, EVERY_USE, ON_GPUS, Expectation, Finding
from zaya_jax.platform.shell import install_command, pip_install

FIRST_JAX, FIRST_UNKNOWN_JAX = (0, 10, 2), (0, 13)
FIRST_PYTHON = (3, 11)
FIRST_ROCM, FIRST_ROCM_WITH_POLLARA = (7, 0), (7, 2, 1)
SLOW_ROCM = (7, 14)
"""Release whose RCCL has fault injection compiled in: slow at 64 to 512 MB between nodes (ROCm/TheRock
#7903)."""
FIRST_JAX_WITH_ROCM_WHEELS = (0, 11, 1)
"""First release whose plugin finds the wheels of `rocm[libraries]` without ROCm on the host (ROCm/rocm-jax
#132)."""
ROCM_WHEEL = "rocm-sdk-core"
"""The part of `rocm[libraries]` that every GPU needs."""
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
"""Flags that AMD's images for training with JAX set on MI300X."""


def version_numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, which can be compared: (7, 2, 1) for "7.2.1-43"."""
    numbers = []
    # After a "-" or a "+" comes the build, which does not count.
    for part in version.partition("-")[0].partition("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check_python(facts: HostFacts) -> Finding:
    """Checks the version of Python."""
    found = facts.versions["python"] or ""
    expected = Expectation("Python", EVERY_USE, "3.11 or later; 3.12 for jax 0.11 and later")
    if version_numbers(found) < FIRST_PYTHON:
        return expected.bad(found, "install Python 3.11 or 3.12, and create the environment with it")
    return expected.good(found)


def check_jax(facts: HostFacts) -> Finding:
    """Checks that jax and jaxlib have the same supported version."""
    jax, jaxlib = facts.versions["jax"], facts.versions["jaxlib"]
    found = f"jax {jax}, jaxlib {jaxlib}".replace("None", "not installed")
    expected = Expectation(
        "jax", EVERY_USE, "0.10.2 or later and below 0.13, and a jaxlib of the same version"
    )
    # Compared as numbers: 0.9 precedes 0.10. A fourth number of jaxlib is a build that still matches.
    numbers, jaxlib_numbers = version_numbers(jax or ""), version_numbers(jaxlib or "")
    if FIRST_JAX <= numbers < FIRST_UNKNOWN_JAX and jaxlib_numbers[:3] == numbers[:3]:
        return expected.good(found)
    return expected.bad(found, f"install both: {pip_install('jax>=0.10.2,<0.13')}")


def check_devices(facts: HostFacts) -> Finding:
    """Checks that jax finds all GPUs, or the CPU on hosts without GPUs."""
    probe, num_gpus = facts.probe, len(facts.gpus)
    expected = Expectation("devices of jax", EVERY_USE, f"{num_gpus} GPUs" if num_gpus else "a device")
    if not probe.kinds:
        action = 'run python -c "import jax; print(jax.devices())" and fix the error that it reports'
        return expected.bad(probe.failure, action)
    found = f"{len(probe.kinds)} x {probe.kinds[0]}"
    # jax falls back to the CPU without an error if its plugin is not installed.
    if num_gpus and probe.platform == "cpu":
        action = "jax does not see the GPUs: install its ROCm plugin, and unset JAX_PLATFORMS if it is cpu"
        return expected.bad(found, action, uses=ON_GPUS)
    if len(probe.kinds) < num_gpus:
        action = "unset ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and JAX_LOCAL_DEVICE_IDS"
        return expected.bad(found, action, uses=ON_GPUS)
    return expected.good(found)


def check_flags(facts: HostFacts) -> Finding:
    """Checks that XLA knows all flags that are set: it aborts the process at an unknown one."""
    flags, refused = facts.environment.get("XLA_FLAGS", ""), facts.probe.unknown_flags
    expected = Expectation("XLA_FLAGS", EVERY_USE, "only flags that this XLA knows")
    if refused:
        return expected.bad(
            f"refused: {', '.join(refused)}",
            "remove the refused flags, or install the version of jax that has them",
        )
    return expected.good(f"accepted: {flags}" if flags else "not set")


def check_training_flags(facts: HostFacts) -> Finding:
    """Checks on GPUs whether AMD's flags for training are set, as far as this XLA knows them."""
    flags, refused = facts.environment.get("XLA_FLAGS", ""), facts.refused_flags or ()
    # Newer versions of XLA remove flags; unknown ones would abort the run, so they are not recommended.
    known = [flag for flag in TRAINING_FLAGS if flag.partition("=")[0].lstrip("-") not in refused]
    # A flag that is set to another value is not missing: somebody has chosen that value.
    missing = [flag for flag in known if flag.partition("=")[0] not in flags]
    found = f"{len(known) - len(missing)} of {len(known)} are set, {len(refused)} are unknown to this XLA"
    expected = Expectation(
        "flags for training", ON_GPUS, "those of AMD's images for training, or others that you have measured"
    )
    if missing:
        return expected.worse(found, f'set XLA_FLAGS="{" ".join(missing)}"')
    return expected.good(found)


def check_plugin(facts: HostFacts) -> Finding:
    """Checks on GPUs that jax, its plugin and its runtime have exactly the same version."""
    jax, plugin, runtime = (facts.versions[name] for name in ("jax", "jax-rocm7-plugin", "jax-rocm7-pjrt"))
    found = f"jax {jax}, jax-rocm7-plugin {plugin}, jax-rocm7-pjrt {runtime}".replace("None", "not installed")
    expected = Expectation("ROCm plugin", ON_GPUS, "all three, with the same version")
    # Three missing packages would have equal versions.
    if jax is None or not jax == plugin == runtime:
        return expected.bad(found, f"install matching versions: {install_command('rocm')}")
    return expected.good(found)


def check_rocm(facts: HostFacts) -> Finding:
    """Checks on GPUs for ROCm 7: on the host, in AMD's image, or as wheels from AMD's index."""
    wheel = facts.versions.get(ROCM_WHEEL)
    has_wheels = version_numbers(facts.versions["jax"] or "") >= FIRST_JAX_WITH_ROCM_WHEELS
    version = facts.rocm or (wheel if has_wheels else None)
    # If both are installed, the plugin may load the RCCL of either.
    releases = [version_numbers(each or "") for each in (version, wheel if has_wheels else None)]
    found = version or f"no /opt/rocm/.info/version, {ROCM_WHEEL} {wheel or 'not installed'}"
    expected = Expectation("ROCm", ON_GPUS, "7.0 or later")
    if releases[0] < FIRST_ROCM:
        return expected.bad(
            found,
            "use AMD's image rocm/jax-training, install ROCm 7 on the host, or with jax 0.11.1 "
            "or later install rocm[libraries] from AMD's index of wheels",
        )
    if any(numbers[:2] == SLOW_ROCM for numbers in releases):
        return expected.worse(
            found,
            "its RCCL has fault injection compiled in and is slow at 64 to 512 MB between nodes "
            "(TheRock #7903): run zaya bench collectives before a long run, or use another release's RCCL",
            uses=(CLUSTER,),
        )
    return expected.good(found)


def check_rccl(facts: HostFacts) -> Finding:
    """Checks on GPUs that RCCL, the library for collectives, can be loaded."""
    version = facts.probe.rccl
    expected = Expectation("RCCL", ON_GPUS, "a library that can be loaded")
    if version:
        return expected.good(version)
    action = "install ROCm's rccl, or add /opt/rocm/lib to LD_LIBRARY_PATH"
    return expected.bad("librccl.so.1 cannot be loaded", action)


def check_network_plugin(facts: HostFacts) -> Finding:
    """Checks on GPUs with AMD's Pollara NICs for RCCL's plugin, which is part of newer ROCm."""
    expected = Expectation("network plugin", (CLUSTER,), "RCCL's plugin, for Pollara NICs")
    if not any(nic.driver == POLLARA_DRIVER for nic in facts.nics):
        return expected.good("no Pollara NIC")
    # RCCL loads the plugin that this variable names, whatever the release of ROCm contains.
    if plugin := facts.environment.get("NCCL_NET_PLUGIN"):
        return expected.good(f"NCCL_NET_PLUGIN={plugin}")
    is_built_in = version_numbers(facts.rocm or "") >= FIRST_ROCM_WITH_POLLARA
    is_enabled = facts.environment.get("RCCL_AINIC_ROCE") == "1"
    found = f"RCCL_AINIC_ROCE={int(is_enabled)}, ROCm {facts.rocm}"
    if is_built_in and is_enabled:
        return expected.good(found)
    old = "install ROCm 7.2.1 or later, or set NCCL_NET_PLUGIN=librccl-anp.so"
    return expected.bad(found, "set RCCL_AINIC_ROCE=1" if is_built_in else old)


def check_rdma(facts: HostFacts) -> Finding:
    """Checks on GPUs the RDMA test of each NIC. Without RDMA RCCL falls back to TCP, or crashes."""
    expected = Expectation("RDMA", (CLUSTER,), "a passed test of each NIC")
    tests = facts.rdma
    if tests is None:
        action = "install ibverbs-utils (rdma-core's tools), and run this again"
        return expected.untested("ibv_rc_pingpong is not installed", action)
    if not tests:
        return expected.bad("no active NIC to test", "fix the NICs above first")
    if failed := [test for test in tests if test.megabits is None]:
        return expected.bad(
            "; ".join(f"{test.name}: {test.failure}" for test in failed),
            "fix their driver, firmware or address; until then NCCL_IB_DISABLE=1 uses slow TCP",
        )
    # No rate is None here, which a type checker cannot see.
    slowest = min(tests, key=lambda test: test.megabits or 0.0)
    found = f"{len(tests)} NICs pass, the slowest with {slowest.megabits:,.0f} Mbit/s: {slowest.name}"
    return expected.good(found)

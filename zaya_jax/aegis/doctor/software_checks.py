"""Checks of a host's software: one pure function per finding, from the facts about the host."""

import functools

from zaya_jax.aegis.doctor.facts import HostFacts
from zaya_jax.aegis.doctor.findings import BAD, CLUSTER, EVERY_USE, ON_GPUS, UNTESTED, WORSE, Finding
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
    version = facts.versions["python"] or ""
    finding = functools.partial(
        Finding,
        name="Python",
        uses=EVERY_USE,
        wanted="3.11 or later; 3.12 for jax 0.11 and later",
        found=version,
    )
    if version_numbers(version) < FIRST_PYTHON:
        return finding(state=BAD, action="install Python 3.11 or 3.12, and create the environment with it")
    return finding()


def check_jax(facts: HostFacts) -> Finding:
    """Checks that jax and jaxlib have the same supported version."""
    jax, jaxlib = facts.versions["jax"], facts.versions["jaxlib"]
    finding = functools.partial(
        Finding,
        name="jax",
        uses=EVERY_USE,
        wanted="0.10.2 or later and below 0.13, and a jaxlib of the same version",
        # A missing package has version None, which the f-string writes as a word.
        found=f"jax {jax}, jaxlib {jaxlib}".replace("None", "not installed"),
    )
    # Compared as numbers: 0.9 precedes 0.10. A fourth number of jaxlib is a build that still matches.
    numbers, jaxlib_numbers = version_numbers(jax or ""), version_numbers(jaxlib or "")
    if FIRST_JAX <= numbers < FIRST_UNKNOWN_JAX and jaxlib_numbers[:3] == numbers[:3]:
        return finding()
    return finding(state=BAD, action=f"install both: {pip_install('jax>=0.10.2,<0.13')}")


def check_devices(facts: HostFacts) -> Finding:
    """Checks that jax finds all GPUs, or the CPU on hosts without GPUs."""
    probe, num_gpus = facts.probe, len(facts.gpus)
    finding = functools.partial(
        Finding, name="devices of jax", wanted=f"{num_gpus} GPUs" if num_gpus else "a device"
    )
    if not probe.kinds:
        action = 'run python -c "import jax; print(jax.devices())" and fix the error that it reports'
        return finding(uses=EVERY_USE, found=probe.failure, state=BAD, action=action)
    found = f"{len(probe.kinds)} x {probe.kinds[0]}"
    # jax falls back to the CPU without an error if its plugin is not installed.
    if num_gpus and probe.platform == "cpu":
        action = "jax does not see the GPUs: install its ROCm plugin, and unset JAX_PLATFORMS if it is cpu"
        return finding(uses=ON_GPUS, found=found, state=BAD, action=action)
    if len(probe.kinds) < num_gpus:
        action = "unset ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and JAX_LOCAL_DEVICE_IDS"
        return finding(uses=ON_GPUS, found=found, state=BAD, action=action)
    return finding(uses=EVERY_USE, found=found)


def check_flags(facts: HostFacts) -> Finding:
    """Checks that XLA knows all flags that are set: it aborts the process at an unknown one."""
    flags, refused = facts.environment.get("XLA_FLAGS", ""), facts.probe.unknown_flags
    finding = functools.partial(
        Finding, name="XLA_FLAGS", uses=EVERY_USE, wanted="only flags that this XLA knows"
    )
    if refused:
        return finding(
            found=f"refused: {', '.join(refused)}",
            state=BAD,
            action="remove the refused flags, or install the version of jax that has them",
        )
    return finding(found=f"accepted: {flags}" if flags else "not set")


def check_training_flags(facts: HostFacts) -> Finding:
    """Checks on GPUs whether AMD's flags for training are set, as far as this XLA knows them."""
    flags, refused = facts.environment.get("XLA_FLAGS", ""), facts.refused_flags or ()
    # Newer versions of XLA remove flags; unknown ones would abort the run, so they are not recommended.
    known = [flag for flag in TRAINING_FLAGS if flag.partition("=")[0].lstrip("-") not in refused]
    # A flag that is set to another value is not missing: somebody has chosen that value.
    missing = [flag for flag in known if flag.partition("=")[0] not in flags]
    finding = functools.partial(
        Finding,
        name="flags for training",
        uses=ON_GPUS,
        wanted="those of AMD's images for training, or others that you have measured",
        found=f"{len(known) - len(missing)} of {len(known)} are set, {len(refused)} are unknown to this XLA",
    )
    if missing:
        return finding(state=WORSE, action=f'set XLA_FLAGS="{" ".join(missing)}"')
    return finding()


def check_plugin(facts: HostFacts) -> Finding:
    """Checks on GPUs that jax, its plugin and its runtime have exactly the same version."""
    jax, plugin, runtime = (facts.versions[name] for name in ("jax", "jax-rocm7-plugin", "jax-rocm7-pjrt"))
    found = f"jax {jax}, jax-rocm7-plugin {plugin}, jax-rocm7-pjrt {runtime}".replace("None", "not installed")
    finding = functools.partial(
        Finding, name="ROCm plugin", uses=ON_GPUS, wanted="all three, with the same version", found=found
    )
    # Three missing packages would have equal versions.
    if jax is None or not jax == plugin == runtime:
        return finding(state=BAD, action=f"install matching versions: {install_command('rocm')}")
    return finding()


def check_rocm(facts: HostFacts) -> Finding:
    """Checks on GPUs for ROCm 7: on the host, in AMD's image, or as wheels from AMD's index."""
    wheel = facts.versions.get(ROCM_WHEEL)
    has_wheels = version_numbers(facts.versions["jax"] or "") >= FIRST_JAX_WITH_ROCM_WHEELS
    version = facts.rocm or (wheel if has_wheels else None)
    # If both are installed, the plugin may load the RCCL of either.
    releases = [version_numbers(each or "") for each in (version, wheel if has_wheels else None)]
    finding = functools.partial(
        Finding,
        name="ROCm",
        wanted="7.0 or later",
        found=version or f"no /opt/rocm/.info/version, {ROCM_WHEEL} {wheel or 'not installed'}",
    )
    if releases[0] < FIRST_ROCM:
        return finding(
            uses=ON_GPUS,
            state=BAD,
            action="use AMD's image rocm/jax-training, install ROCm 7 on the host, or with jax 0.11.1 "
            "or later install rocm[libraries] from AMD's index of wheels",
        )
    if any(numbers[:2] == SLOW_ROCM for numbers in releases):
        return finding(
            uses=(CLUSTER,),
            state=WORSE,
            action="its RCCL has fault injection compiled in and is slow at 64 to 512 MB between nodes "
            "(TheRock #7903): run zaya bench collectives before a long run, or use another release's RCCL",
        )
    return finding(uses=ON_GPUS)


def check_rccl(facts: HostFacts) -> Finding:
    """Checks on GPUs that RCCL, the library for collectives, can be loaded."""
    version = facts.probe.rccl
    finding = functools.partial(Finding, name="RCCL", uses=ON_GPUS, wanted="a library that can be loaded")
    if version:
        return finding(found=version)
    action = "install ROCm's rccl, or add /opt/rocm/lib to LD_LIBRARY_PATH"
    return finding(found="librccl.so.1 cannot be loaded", state=BAD, action=action)


def check_network_plugin(facts: HostFacts) -> Finding:
    """Checks on GPUs with AMD's Pollara NICs for RCCL's plugin, which is part of newer ROCm."""
    finding = functools.partial(
        Finding, name="network plugin", uses=(CLUSTER,), wanted="RCCL's plugin, for Pollara NICs"
    )
    if not any(nic.driver == POLLARA_DRIVER for nic in facts.nics):
        return finding(found="no Pollara NIC")
    # RCCL loads the plugin that this variable names, whatever the release of ROCm contains.
    if plugin := facts.environment.get("NCCL_NET_PLUGIN"):
        return finding(found=f"NCCL_NET_PLUGIN={plugin}")
    is_built_in = version_numbers(facts.rocm or "") >= FIRST_ROCM_WITH_POLLARA
    is_enabled = facts.environment.get("RCCL_AINIC_ROCE") == "1"
    found = f"RCCL_AINIC_ROCE={int(is_enabled)}, ROCm {facts.rocm}"
    if is_built_in and is_enabled:
        return finding(found=found)
    old = "install ROCm 7.2.1 or later, or set NCCL_NET_PLUGIN=librccl-anp.so"
    return finding(found=found, state=BAD, action="set RCCL_AINIC_ROCE=1" if is_built_in else old)


def check_rdma(facts: HostFacts) -> Finding:
    """Checks on GPUs the RDMA test of each NIC. Without RDMA RCCL falls back to TCP, or crashes."""
    finding = functools.partial(Finding, name="RDMA", uses=(CLUSTER,), wanted="a passed test of each NIC")
    tests = facts.rdma
    if tests is None:
        action = "install ibverbs-utils (rdma-core's tools), and run this again"
        return finding(found="ibv_rc_pingpong is not installed", state=UNTESTED, action=action)
    if not tests:
        return finding(found="no active NIC to test", state=BAD, action="fix the NICs above first")
    if failed := [test for test in tests if test.megabits is None]:
        return finding(
            found="; ".join(f"{test.name}: {test.failure}" for test in failed),
            state=BAD,
            action="fix their driver, firmware or address; until then NCCL_IB_DISABLE=1 uses slow TCP",
        )
    # No rate is None here, which a type checker cannot see.
    slowest = min(tests, key=lambda test: test.megabits or 0.0)
    found = f"{len(tests)} NICs pass, the slowest with {slowest.megabits:,.0f} Mbit/s: {slowest.name}"
    return finding(found=found)

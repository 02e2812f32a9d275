"""All checks of a host, and what several hosts' findings come to."""

from collections.abc import Callable, Mapping, Sequence

from zaya_jax.aegis import host_checks, software_checks
from zaya_jax.aegis.acceptance import check_speed
from zaya_jax.aegis.findings import STATES, Finding
from zaya_jax.aegis.readings import Readings

Check = Callable[[Readings], Finding]
EVERYWHERE: tuple[Check, ...] = (
    software_checks.check_python,
    software_checks.check_jax,
    software_checks.check_devices,
    software_checks.check_flags,
    host_checks.check_memory,
    host_checks.check_disk,
    host_checks.check_open_files,
    host_checks.check_ports,
    host_checks.check_clock,
    host_checks.check_gpus,
)
WITH_GPUS: tuple[Check, ...] = (
    software_checks.check_plugin,
    software_checks.check_rocm,
    software_checks.check_rccl,
    software_checks.check_training_flags,
    host_checks.check_shared_memory,
    host_checks.check_nics,
    software_checks.check_rdma,
    software_checks.check_network_plugin,
    host_checks.check_locked_memory,
)
"""What a laptop lacks is GPUs: that it has no RDMA either is of no use to its owner."""


def examine(readings: Readings) -> list[Finding]:
    """All findings on a host."""
    checks = (*EVERYWHERE, *WITH_GPUS) if readings.gpus else EVERYWHERE
    findings = [check(readings) for check in checks]
    return [*findings, *check_speed(readings)] if readings.gpus else findings


def worst_by_name(found: Mapping[str, Sequence[Finding]]) -> list[tuple[Finding, list[str]]]:
    """Of each thing the worst finding of all hosts, and the hosts on which its state is that.

    Args:
      found: by host.
    """
    names = dict.fromkeys(each.name for findings in found.values() for each in findings)
    worst = []
    for name in names:
        by_host = {host: each for host, findings in found.items() for each in findings if each.name == name}
        state = max((each.state for each in by_host.values()), key=STATES.index)
        hosts = [host for host, each in by_host.items() if each.state == state]
        worst.append((by_host[hosts[0]], hosts))
    return worst

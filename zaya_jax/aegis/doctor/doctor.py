"""All checks of a host, and the combination of several hosts' findings."""

from collections.abc import Callable, Mapping, Sequence

from zaya_jax.aegis.doctor import host_checks, software_checks
from zaya_jax.aegis.doctor.acceptance import check_speed
from zaya_jax.aegis.doctor.facts import HostFacts
from zaya_jax.aegis.doctor.findings import STATES, Finding

Check = Callable[[HostFacts], Finding]
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
"""Checks for hosts with GPUs. On a laptop they would only repeat that it has no GPUs."""


def examine(facts: HostFacts) -> list[Finding]:
    """Runs all checks of a host."""
    checks = (*EVERYWHERE, *WITH_GPUS) if facts.gpus else EVERYWHERE
    findings = [check(facts) for check in checks]
    return [*findings, *check_speed(facts)] if facts.gpus else findings


def worst_by_name(found: Mapping[str, Sequence[Finding]]) -> list[tuple[Finding, list[str]]]:
    """Returns the worst finding of each check over all hosts, and the hosts with that state.

    Args:
      found: findings by host.
    """
    # A dict keeps the order of the checks, which a set would not.
    names = dict.fromkeys(each.name for findings in found.values() for each in findings)
    worst = []
    for name in names:
        by_host = {host: each for host, findings in found.items() for each in findings if each.name == name}
        state = max((each.state for each in by_host.values()), key=STATES.index)
        hosts = [host for host, each in by_host.items() if each.state == state]
        # One finding stands for all hosts of this state, although their figures may differ from host to
        # host.
        worst.append((by_host[hosts[0]], hosts))
    return worst

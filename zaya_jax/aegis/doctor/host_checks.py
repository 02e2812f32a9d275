"""Checks of a host's hardware and limits: one pure function per finding, from the facts about the host."""

from zaya_jax.aegis.doctor.facts import HostFacts
from zaya_jax.aegis.doctor.findings import CLUSTER, EVERY_USE, ON_GPUS, SMALL, Expectation, Finding
from zaya_jax.aegis.doctor.host_facts import COORDINATOR_PORTS
from zaya_jax.text_tables import format_bytes

GPUS_OF_A_NODE, ARCHITECTURES = 8, ("gfx942", "gfx950")
"""Number of GPUs of an MI300X node, and architectures of MI300X and MI325X, and of MI355X."""
MIN_MEMORY = 2 * 2**30
MIN_SHARED_MEMORY = 64 * 2**30
"""Minimum size of /dev/shm in bytes, as AMD sets it for its containers (`--shm-size 64G`). RCCL uses it to
exchange data between the processes of a node."""
MIN_OPEN_FILES = {SMALL: 1024, CLUSTER: 65_536}
SLOW_SYNC_SECONDS, SLOW_WRITE = 0.1, 0.5e9
MIN_FREE_BYTES = 2 * 2**30
MAX_CLOCK_ERROR, MAX_CLOCKS_APART = 1.0, 1.0
"""Maximum errors of clocks in seconds: with larger ones the logs of several hosts cannot be ordered."""


def check_gpus(facts: HostFacts) -> Finding:
    """Checks AMD's GPUs: number, architecture, and permissions."""
    expected = Expectation("GPUs", ON_GPUS, "8 MI300X or later that this user may open")
    gpus = facts.gpus
    if not gpus:
        return expected.bad(
            "no AMD GPU: the driver lists none",
            "for large models use a node with MI300X; start a container with --device=/dev/kfd "
            "--device=/dev/dri --group-add video",
        )
    kinds = ", ".join(sorted({gpu.architecture for gpu in gpus}))
    found = f"{len(gpus)} of {kinds}, {format_bytes(min(gpu.memory_bytes for gpu in gpus))} each"
    # Before the architecture, because a GPU that this user may not open cannot be used at all.
    if forbidden := sum(not gpu.may_be_used for gpu in gpus):
        return expected.bad(
            f"{found}, {forbidden} of which this user may not open",
            "add the user to the groups video and render; start a container with --group-add video",
        )
    if any(gpu.architecture not in ARCHITECTURES for gpu in gpus):
        action = f"kernels are compiled only for {' and '.join(ARCHITECTURES)}; use such GPUs"
        return expected.worse(found, action)
    if len(gpus) != GPUS_OF_A_NODE:
        action = "use all eight GPUs: collectives between n GPUs of a node use only n - 1 links of each"
        return expected.worse(found, action)
    return expected.good(found)


def check_nics(facts: HostFacts) -> Finding:
    """Checks RDMA ports: one active port per GPU, and no lost links."""
    # A host without GPUs still needs a port for the traffic between hosts.
    wanted = max(len(facts.gpus), 1)
    expected = Expectation("NICs", (CLUSTER,), f"{wanted} active, one per GPU")
    if not facts.nics:
        return expected.bad(
            "no RDMA device under /sys/class/infiniband",
            "load the driver; in a container provide /dev/infiniband; otherwise only TCP is available",
        )
    up = [nic for nic in facts.nics if nic.state == "ACTIVE"]
    rates = ", ".join(sorted({f"{nic.gigabits:g}" for nic in up})) or "0"
    found = f"{len(up)} of {len(facts.nics)} ports are active, with {rates} Gb/s"
    # Named one by one, because a cable or a switch port is found by the name of its device.
    down = [f"{nic.name} ({nic.state or 'no state'})" for nic in facts.nics if nic.state != "ACTIVE"]
    if len(up) < wanted and down:
        action = f"bring up {', '.join(down)}: check cable, switch port and driver"
        return expected.bad(found, action)
    if len(up) < wanted:
        return expected.bad(found, "check that all devices have a driver")
    # An active port that has lost its link before may lose it again during a run.
    if flapped := [f"{nic.name} {nic.link_downed} times" for nic in up if nic.link_downed]:
        action = f"links were lost: {', '.join(flapped)}; check cables and switch ports"
        return expected.worse(found, action)
    return expected.good(found)


def check_memory(facts: HostFacts) -> Finding:
    """Checks host memory for a small run; `zaya plan` computes what large runs need."""
    found = f"{format_bytes(facts.memory_bytes)} available"
    expected = Expectation("memory", EVERY_USE, f"{format_bytes(MIN_MEMORY)} for configs/tiny.py")
    if facts.memory_bytes < MIN_MEMORY:
        return expected.bad(found, "end other programs, or reduce batch_size")
    return expected.good(found)


def check_shared_memory(facts: HostFacts) -> Finding:
    """Checks `/dev/shm`, which containers limit to 64 MiB by default."""
    size = facts.shared_memory
    found = "not available" if size is None else format_bytes(size)
    expected = Expectation("/dev/shm", ON_GPUS, format_bytes(MIN_SHARED_MEMORY))
    if size is None or size < MIN_SHARED_MEMORY:
        return expected.bad(found, "start the container with --shm-size 64G or --ipc=host")
    return expected.good(found)


def check_open_files(facts: HostFacts) -> Finding:
    """Checks the limit of open files and connections per process."""
    limit = facts.limits.open_files
    found = "no limit" if limit is None else f"at most {limit:,}"
    expected = Expectation(
        "open files", EVERY_USE, f"{MIN_OPEN_FILES[SMALL]:,}; on many nodes {MIN_OPEN_FILES[CLUSTER]:,}"
    )
    # Process 0 has a connection to every process of a run.
    if limit is None or limit >= MIN_OPEN_FILES[CLUSTER]:
        return expected.good(found)
    action = f"run ulimit -n {MIN_OPEN_FILES[CLUSTER]} first"
    if limit < MIN_OPEN_FILES[SMALL]:
        return expected.bad(found, action)
    # Enough on a single node, where process 0 has few connections.
    return expected.worse(found, action, uses=(CLUSTER,))


def check_locked_memory(facts: HostFacts) -> Finding:
    """Checks the limit of locked memory: RDMA locks its buffers, and fails during a run if it is too low."""
    limit = facts.limits.locked_bytes
    expected = Expectation("locked memory", (CLUSTER,), "no limit, for RDMA")
    if limit is None:
        return expected.good("no limit")
    action = "run ulimit -l unlimited first; start a container with --ulimit memlock=-1"
    return expected.bad(f"at most {format_bytes(limit)}", action)


def check_ports(facts: HostFacts) -> Finding:
    """Checks the TCP ports at which the first process of a run listens."""
    ports = facts.ports
    found = (
        f"{len(ports.taken)} of {len(COORDINATOR_PORTS)} ports from {COORDINATOR_PORTS.start} on are "
        f"taken; the ephemeral range is {ports.first_ephemeral} to {ports.last_ephemeral}"
    )
    expected = Expectation(
        "ports", (CLUSTER,), f"free ports, and an ephemeral range below {COORDINATOR_PORTS.start}"
    )
    if len(ports.taken) == len(COORDINATOR_PORTS):
        return expected.bad(found, "check which program listens (ss -ltn), or whether sockets are forbidden")
    # A port within the ephemeral range may be in use when process 0 of a later run binds it.
    if ports.last_ephemeral >= COORDINATOR_PORTS.start:
        return expected.worse(
            found,
            "the kernel may assign a coordinator's port to another program: run "
            'sysctl net.ipv4.ip_local_port_range="32768 60999"',
        )
    return expected.good(found)


def check_clock(facts: HostFacts) -> Finding:
    """Checks that the clock is synchronized, and close to those of the other hosts."""
    clock, apart = facts.clock, facts.clock_apart_seconds
    if clock is None:
        status = "unknown to this process"
    else:
        status = "synchronized" if clock.is_synchronised else "not synchronized"
    found = status if apart is None else f"{status}, {apart:.2f} s between hosts"
    expected = Expectation(
        "clock", (CLUSTER,), f"synchronized by NTP, at most {MAX_CLOCKS_APART:g} s from other hosts"
    )
    # Before the kernel's status: clocks that differ are wrong even if each host calls its own synchronized.
    if apart is not None and apart > MAX_CLOCKS_APART:
        return expected.bad(found, "start chrony on all hosts with the same server")
    if clock is None:
        return expected.untested(found, "run chronyc tracking on the host")
    if not clock.is_synchronised or clock.max_error_seconds > MAX_CLOCK_ERROR:
        return expected.worse(found, "start chrony or another NTP client")
    return expected.good(found)


def check_disk(facts: HostFacts) -> Finding:
    """Checks the disk of the run folder: free space, and the time that checkpoints wait for it."""
    disk = facts.disk
    expected = Expectation(
        "disk",
        EVERY_USE,
        f"{format_bytes(MIN_FREE_BYTES)} free, {SLOW_WRITE / 1e9:g} GB/s, an fsync within "
        f"{1e3 * SLOW_SYNC_SECONDS:.0f} ms",
    )
    if disk is None:
        return expected.untested("not measured", "run without --no-disk")
    found = (
        f"{disk.folder}: {format_bytes(disk.free_bytes)} free, {disk.write_bandwidth / 1e9:.2f} GB/s, "
        f"slowest fsync {1e3 * disk.sync_worst:,.0f} ms"
    )
    # Before the speed, which is not measured on a disk that is nearly full.
    if disk.free_bytes < MIN_FREE_BYTES:
        action = "free some space, or use another disk with --config.run_folder"
        return expected.bad(found, action)
    if disk.write_bandwidth < SLOW_WRITE or disk.sync_worst > SLOW_SYNC_SECONDS:
        action = (
            "checkpoints are slow on this disk: zaya bench storage measures how slow; try another --folder"
        )
        return expected.worse(found, action)
    return expected.good(found)

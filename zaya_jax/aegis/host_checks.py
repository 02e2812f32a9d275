"""The doctor's sentences on a host: one pure function a thing, from what was read of it."""

from zaya_jax.aegis.findings import BAD, CLUSTER, GOOD, NODE, SMALL, UNTESTED, WORSE, Finding
from zaya_jax.aegis.host_readings import COORDINATOR_PORTS
from zaya_jax.aegis.readings import Readings
from zaya_jax.tables import format_bytes

EVERY_USE = (SMALL, NODE, CLUSTER)
ON_GPUS = (NODE, CLUSTER)
GPUS_OF_A_NODE, ARCHITECTURES = 8, ("gfx942", "gfx950")
"""Of an MI300X node, and of MI300X, MI325X and MI355X."""
LEAST_MEMORY = 2 * 2**30
LEAST_SHARED_MEMORY = 64 * 2**30
"""What AMD gives its containers (`--shm-size 64G`), through which the processes of a node exchange."""
LEAST_OPEN_FILES = {SMALL: 1024, CLUSTER: 65_536}
SLOW_SYNC_SECONDS, SLOW_WRITE = 0.1, 0.5e9
LEAST_FREE = 2 * 2**30
MOST_CLOCK_ERROR, MOST_CLOCKS_APART = 1.0, 1.0
"""Seconds. Whoever reads logs of several hosts beside each other must know what came first."""


def check_gpus(readings: Readings) -> Finding:
    """AMD's GPUs: how many, which, and whether this user may open them."""
    gpus = readings.gpus
    kinds = ", ".join(sorted({gpu.architecture for gpu in gpus}))
    state, action = GOOD, ""
    found = f"{len(gpus)} of {kinds}, {format_bytes(min((gpu.memory_bytes for gpu in gpus), default=0))} each"
    if not gpus:
        state, found = BAD, "no AMD GPU: the driver lists none"
        action = (
            "for large models take a node with MI300X; in a container give it --device=/dev/kfd "
            "--device=/dev/dri --group-add video"
        )
    elif not all(gpu.may_be_used for gpu in gpus):
        state = BAD
        found += f", {sum(not gpu.may_be_used for gpu in gpus)} of which this user may not open"
        action = "add the user to the groups video and render, or the container by --group-add video"
    elif any(gpu.architecture not in ARCHITECTURES for gpu in gpus):
        state, action = WORSE, f"kernels were compiled for {' and '.join(ARCHITECTURES)} only; take those"
    elif len(gpus) != GPUS_OF_A_NODE:
        state = WORSE
        action = "collectives want all eight: between n GPUs of a node only n - 1 links of each are used"
    return Finding(
        name="GPUs",
        state=state,
        found=found,
        wanted="8 MI300X or later that may be opened",
        action=action,
        uses=ON_GPUS,
    )


def check_nics(readings: Readings) -> Finding:
    """NICs that can do RDMA: one a GPU, up, and none that lost its link."""
    up = [nic for nic in readings.nics if nic.state == "ACTIVE"]
    down = [nic for nic in readings.nics if nic.state != "ACTIVE"]
    flapped = [f"{nic.name} {nic.link_downed} times" for nic in up if nic.link_downed]
    wanted = max(len(readings.gpus), 1)
    state, action = GOOD, ""
    if len(up) < wanted:
        state = BAD
        names = ", ".join(f"{nic.name} ({nic.state or 'no state'})" for nic in down)
        action = (
            f"bring up {names}: cable, switch port, driver"
            if down
            else "see that their driver is loaded and a container has /dev/infiniband; without, TCP is left"
        )
    elif flapped:
        state, action = WORSE, f"links were lost: {', '.join(flapped)}; look at cables and switch ports"
    rates = ", ".join(sorted({f"{nic.gigabits:g}" for nic in up})) or "0"
    return Finding(
        name="NICs",
        state=state,
        found=f"{len(up)} of {len(readings.nics)} ports are up, with {rates} Gb/s"
        if readings.nics
        else "no device for RDMA under /sys/class/infiniband",
        wanted=f"{wanted} that are up, one a GPU",
        action=action,
        uses=(CLUSTER,),
    )


def check_memory(readings: Readings) -> Finding:
    """Host memory for a small run; what a large one needs, `zaya plan` says."""
    is_good = readings.memory_bytes >= LEAST_MEMORY
    return Finding(
        name="memory",
        state=GOOD if is_good else BAD,
        found=f"{format_bytes(readings.memory_bytes)} are free",
        wanted=f"{format_bytes(LEAST_MEMORY)} for configs/tiny.py",
        action="" if is_good else "end what else takes memory, or make batch_size smaller",
        uses=EVERY_USE,
    )


def check_shared_memory(readings: Readings) -> Finding:
    """On GPUs: `/dev/shm`, of which a container has 64 MiB unless it is told."""
    size = readings.shared_memory
    is_good = size is not None and size >= LEAST_SHARED_MEMORY
    return Finding(
        name="/dev/shm",
        state=GOOD if is_good else BAD,
        found="there is none" if size is None else format_bytes(size),
        wanted=f"{format_bytes(LEAST_SHARED_MEMORY)}",
        action="" if is_good else "give the container --shm-size 64G or --ipc=host",
        uses=ON_GPUS,
    )


def check_open_files(readings: Readings) -> Finding:
    """The number of files and connections that a process may have open."""
    limit = readings.limits.open_files
    state, uses = GOOD, EVERY_USE
    if limit is not None and limit < LEAST_OPEN_FILES[SMALL]:
        state = BAD
    elif limit is not None and limit < LEAST_OPEN_FILES[CLUSTER]:
        state, uses = WORSE, (CLUSTER,)
    return Finding(
        name="open files",
        state=state,
        found="no limit" if limit is None else f"at most {limit:,}",
        wanted=f"{LEAST_OPEN_FILES[SMALL]:,}; on many nodes {LEAST_OPEN_FILES[CLUSTER]:,}",
        action="" if state == GOOD else f"ulimit -n {LEAST_OPEN_FILES[CLUSTER]} before the run",
        uses=uses,
    )


def check_locked_memory(readings: Readings) -> Finding:
    """On GPUs: what RDMA registers must not be limited, or it fails in the middle of a run."""
    limit = readings.limits.locked_bytes
    return Finding(
        name="locked memory",
        state=GOOD if limit is None else BAD,
        found="no limit" if limit is None else f"at most {format_bytes(limit)}",
        wanted="no limit, for RDMA",
        action="" if limit is None else "ulimit -l unlimited; of a container --ulimit memlock=-1",
        uses=(CLUSTER,),
    )


def check_ports(readings: Readings) -> Finding:
    """TCP ports that the first process of a run listens at."""
    ports = readings.ports
    overlaps = ports.last_ephemeral >= COORDINATOR_PORTS.start
    state, action = GOOD, ""
    if len(ports.taken) == len(COORDINATOR_PORTS):
        state, action = (
            BAD,
            "none can be had: see who listens there (ss -ltn), or whether sockets are forbidden",
        )
    elif overlaps:
        state = WORSE
        action = (
            'a coordinator\'s port may be given to others: sysctl net.ipv4.ip_local_port_range="32768 60999"'
        )
    return Finding(
        name="ports",
        state=state,
        found=f"{len(ports.taken)} of {len(COORDINATOR_PORTS)} tried from {COORDINATOR_PORTS.start} on are "
        f"taken; the kernel gives {ports.first_ephemeral} to {ports.last_ephemeral} to anyone",
        wanted=f"free ones, and the kernel's own below {COORDINATOR_PORTS.start}",
        action=action,
        uses=(CLUSTER,),
    )


def check_clock(readings: Readings) -> Finding:
    """A clock that something keeps right, and near those of the other hosts."""
    clock, apart = readings.clock, readings.clock_apart_seconds
    state, action = GOOD, ""
    if apart is not None and apart > MOST_CLOCKS_APART:
        state, action = BAD, "start chrony on all hosts with one server"
    elif clock is None:
        state, action = UNTESTED, "ask chronyc tracking on the host"
    elif not clock.is_synchronised or clock.max_error_seconds > MOST_CLOCK_ERROR:
        state, action = WORSE, "start chrony, or another NTP client"
    kept = (
        "the kernel may not be asked"
        if clock is None
        else "kept right"
        if clock.is_synchronised
        else "kept right by nobody"
    )
    off = "" if apart is None else f", {apart:.2f} s from the host that is furthest off"
    return Finding(
        name="clock",
        state=state,
        found=kept + off,
        wanted=f"one that NTP keeps right, at most {MOST_CLOCKS_APART:g} s from others",
        action=action,
        uses=(CLUSTER,),
    )


def check_disk(readings: Readings) -> Finding:
    """The disk of the folder for runs: room, and how long a save waits for it."""
    disk = readings.disk
    wanted = (
        f"{format_bytes(LEAST_FREE)} free, {SLOW_WRITE / 1e9:g} GB/s, "
        f"an fsync within {1e3 * SLOW_SYNC_SECONDS:.0f} ms"
    )
    if disk is None:
        return Finding(
            name="disk",
            state=UNTESTED,
            found="not measured",
            wanted=wanted,
            action="ask without --no-disk",
            uses=EVERY_USE,
        )
    state, action = GOOD, ""
    if disk.free_bytes < LEAST_FREE:
        state, action = BAD, "make room, or put runs elsewhere by --config.run_folder"
    elif disk.write_bandwidth < SLOW_WRITE or disk.sync_worst > SLOW_SYNC_SECONDS:
        state = WORSE
        action = (
            "checkpoints will take long there: zaya bench storage says how long; --folder asks for another"
        )
    return Finding(
        name="disk",
        state=state,
        found=f"{disk.folder}: {format_bytes(disk.free_bytes)} free, "
        f"{disk.write_bandwidth / 1e9:.2f} GB/s, slowest "
        f"fsync {1e3 * disk.sync_worst:,.0f} ms",
        wanted=wanted,
        action=action,
        uses=EVERY_USE,
    )

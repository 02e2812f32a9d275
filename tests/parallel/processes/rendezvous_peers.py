"""Processes in a rendezvous, each a thread of this one, for tests."""

import concurrent.futures
import contextlib
import socket

from zaya_jax.errors import UserError
from zaya_jax.parallel.processes.errors import PeerTimeout
from zaya_jax.parallel.processes.listeners import PeerConnection, host_and_port
from zaya_jax.parallel.processes.process_group import ProcessGroup
from zaya_jax.parallel.processes.rendezvous import assembled
from zaya_jax.parallel.processes.tree.children import Hello
from zaya_jax.parallel.processes.tree.shape import FAN_OUT


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def come(
    coordinator: str,
    count: int,
    process: int,
    limit: float,
    *,
    fan_out: int = FAN_OUT,
    is_derived: bool = False,
    name: str = "127.0.0.1",
    messages: dict[int, int] | None = None,
):
    """Returns the result of a process: the hosts of all, or an error.

    Args:
      is_derived: whether the process knows the hosts of all.
      name: derived name of each host.
      messages: receives the number of messages of this process, by its number.
    """
    try:
        group = ProcessGroup(coordinator, count, process, hosts=(name,) * count if is_derived else ())
        host = f"host{process}"
        with assembled(group, host=host, limit_seconds=limit, fan_out=fan_out) as assembly:
            pass
        assert set(assembly.connections) == {*assembly.place.children, assembly.place.parent} - {None}
        assembly.close()
        if messages is not None:
            messages[process] = assembly.num_messages
        return assembly.hosts
    except (PeerTimeout, UserError) as error:
        return error


def introduce(coordinator: str, count: int, process: int, *, port: int = 0, run: str = "") -> PeerConnection:
    """Connects a process that does nothing else."""
    host, number = host_and_port(coordinator)
    connection = PeerConnection(socket.create_connection((host, number), 10.0))
    hello = Hello(process, count, "h", port, host, coordinator, run)
    connection.send(hello._asdict())
    return connection


def receive(connection: PeerConnection) -> dict:
    """Returns the next message."""
    while (message := connection.next_message()) is None:
        connection.fill()
    return message


def come_together(count: int, present, *, limit: float, counts=None, **options):
    """Returns the result of each process in `present`."""
    coordinator = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(len(present)) as threads:
        each = [
            threads.submit(come, coordinator, (counts or {}).get(process, count), process, limit, **options)
            for process in present
        ]
        return [future.result(timeout=60) for future in each]

"""Processes of a run as threads of this one, which the rendezvous connects over the loopback, for tests."""

import concurrent.futures
import contextlib
import socket
from collections.abc import Callable, Iterator

from zaya_jax.parallel.processes.process_group import ProcessGroup
from zaya_jax.parallel.processes.rendezvous import Assembly, assembled
from zaya_jax.parallel.processes.tree.exchanges import Exchanges
from zaya_jax.parallel.processes.tree.links import TreeLinks


def free_address() -> str:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Peers:
    """Processes that are connected as a tree.

    Attributes:
      links: links by process number.
      exchanges: exchanges by process number.
    """

    def __init__(self, links: list[TreeLinks], *, limit_seconds: float):
        self.links = links
        self.exchanges = [
            Exchanges(each, "process {} on node".format, limit_seconds=limit_seconds) for each in links
        ]
        self._threads = concurrent.futures.ThreadPoolExecutor(len(links))

    def on(self, numbers, work: Callable[[Exchanges, int], object]) -> dict[int, object]:
        """Returns the result or the error of each process."""

        def run(number: int) -> object:
            try:
                return work(self.exchanges[number], number)
            except Exception as error:
                return error

        return dict(zip(numbers, self._threads.map(run, numbers), strict=True))

    def close(self) -> None:
        for each in self.links:
            each.close()
        self._threads.shutdown()


@contextlib.contextmanager
def connected(count: int, *, fan_out: int, limit_seconds: float = 20.0) -> Iterator[Peers]:
    address = free_address()

    def join(number: int) -> Assembly:
        group = ProcessGroup(address, count, number)
        with assembled(group, host=f"h{number}", limit_seconds=20.0, fan_out=fan_out) as assembly:
            pass
        return assembly

    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        assemblies = list(threads.map(join, range(count)))
    peers = Peers(
        [TreeLinks(each.place, each.connections) for each in assemblies], limit_seconds=limit_seconds
    )
    try:
        yield peers
    finally:
        peers.close()

"""Rendezvous of a run's processes before jax connects them.

If peers do not come, jax's client aborts the process with a C++ stack trace that names no process. So the
processes first connect in their tree, over plain TCP, and at the time limit every process learns which ones
are late. Names of hosts go up the tree, merged, and the list of all goes down.

A process connects with its parent. Where the launcher tells the hosts of all, it derives the address, so that
process 0 has messages only from its children. That is a shortcut, on which nothing depends: without an answer
the process begins at the coordinator's address, which all know. There process 0 sends it in one short message
to the child that is next for it, which does the same, until it has reached its parent. While the next one is
missing, it waits.
"""

import contextlib
import dataclasses
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.errors import UserError
from zaya_jax.parallel.processes.errors import PeerTimeout
from zaya_jax.parallel.processes.listeners import (
    PeerConnection,
    allow_connections,
    host_and_port,
    listen,
    parent_port,
    resolution_failure,
)
from zaya_jax.parallel.processes.process_group import ProcessGroup
from zaya_jax.parallel.processes.tree.children import (
    SEND_SECONDS,
    ChildRegistry,
    Hello,
    numbers_in,
    wait_for_events,
)
from zaya_jax.parallel.processes.tree.shape import FAN_OUT, Place, place_of

# Messages, each one line of JSON. Up, from a process to its parent, process 0 or one in between:
#   Hello                                           the first one
#   {"hosts": ["...", ...]}                         to its parent: its subtree is complete
#   {"missing": [[3, 5]]}                           to its parent: processes 3 and 4 are not there
#   {"present": [[2, 3]]}                           to another one, in which it waits: process 2 is there
# Down:
#   {"next": [HOST, PORT, RUN], "process": N}       connect to process N
#   {"accepted": "..."}                             this is the parent; what keeps it from process 0
#   {"obstacle": "..."}                             that has changed
#   {"missing": "processes 3, 4"}                   while process 0 waits
#   {"hosts": ["...", ...]}                         all are connected; the connection stays open
#   {"late": "..."}                                 time limit reached; raise PeerTimeout
#   {"refused": "..."}                              inconsistent numbers; raise UserError
_POLL_SECONDS = 0.2
# Shortest pause between two attempts to reach a parent, which doubles up to `_POLL_SECONDS`.
_MIN_PAUSE_SECONDS = 0.01
# Time after which a process that its parent has not accepted begins at process 0: a launcher usually starts
# all within less. Also as a share of the time limit, before which process 0 must know that it is there.
_SHORTCUT_SECONDS, _SHORTCUT_SHARE = 5.0, 0.25
# Time to connect with a parent: a host that does not even refuse is down or protected by a firewall.
_CONNECT_SECONDS = 2.0
# Shortest time between two reports of what is missing, and after which process 0 sends the first one down; it
# doubles with each, so that thousands of processes that wait do not keep others busy.
_REPORT_SECONDS = 1.0
# Time that a process waits, after its own limit, for the message of process 0 that names the late ones.
_GRACE_SECONDS = 5.0
# Time for which process 0 tries to bind its port, which a process of the previous attempt may still hold.
_BIND_SECONDS = 10.0
# Number of late processes that a message lists; the rest are counted.
_MAX_NAMED = 8


@dataclasses.dataclass
class Assembly:
    """The processes of a run after they have met.

    Attributes:
      place: place of this process in the tree.
      hosts: host names of all processes, by process number.
      connections: connections with the parent and the children, by process number.
      num_messages: number of messages that this process has sent and received so far; in process 0 complete
        only after the context of `assembled`.
    """

    place: Place
    hosts: tuple[str, ...]
    connections: dict[int, PeerConnection]
    num_messages: int = 0

    def close(self) -> None:
        """Closes the connections with the parent and all children."""
        for connection in self.connections.values():
            connection.close()


@contextlib.contextmanager
def assembled(
    group: ProcessGroup, *, host: str, limit_seconds: float, fan_out: int = FAN_OUT
) -> Iterator[Assembly]:
    """Waits until all processes of a run have started; yields their host names and this one's connections.

    The other processes are released when the context of process 0 ends. By then jax's service must listen at
    the same address.

    Args:
      group: processes of the run.
      host: name of this process' host.
      limit_seconds: time limit in seconds.
      fan_out: maximum number of children of a process in the tree.

    Raises:
      PeerTimeout: if some processes do not come in time; it names them.
      UserError: if two processes have the same number, or were started with different numbers of processes.
    """
    place = place_of(group.process, group.num_processes, fan_out=fan_out)
    if group.num_processes == 1:
        yield Assembly(place, (host,), {})
        return
    if group.process == 0:
        allow_connections(group.num_processes)
        listener = _bind(group.coordinator)
    else:
        # Most processes have no children, and need no port.
        listener = _listen_for_children(group) if place.children else None
    with (
        selectors.DefaultSelector() as selector,
        ChildRegistry(group, place, host, listener, selector) as children,
    ):
        if group.process != 0:
            yield _Joining(group, place, host, selector, children, limit_seconds).join()
            return
        try:
            hosts = _wait_for_all(group, host, selector, children, limit_seconds)
            # jax's service needs the port.
            children.stop()
            assembly = Assembly(place, tuple(hosts), children.connections)
            yield assembly
        except BaseException as error:
            children.send({"refused" if isinstance(error, UserError) else "late": str(error)})
            raise
        children.send({"hosts": hosts})
        assembly.num_messages = children.num_messages


def _shortcut_seconds(limit_seconds: float) -> float:
    """Returns for how long a process tries to reach its parent without process 0."""
    return min(_SHORTCUT_SECONDS, _SHORTCUT_SHARE * limit_seconds)


def _names(processes: Sequence[int]) -> str:
    shown = ", ".join(map(str, processes[:_MAX_NAMED]))
    more = f" and {len(processes) - _MAX_NAMED} more" if len(processes) > _MAX_NAMED else ""
    return f"process{'es' if len(processes) > 1 else ''} {shown}{more}"


# Process 0


def _wait_for_all(
    group: ProcessGroup,
    host: str,
    selector: selectors.BaseSelector,
    children: ChildRegistry,
    limit_seconds: float,
) -> list[str]:
    """Waits in process 0 until all processes are connected; returns their hosts.

    Raises:
      PeerTimeout: with the late processes.
      UserError: for a process that was started with another number of processes.
    """
    begin, report = time.monotonic(), _REPORT_SECONDS
    while (hosts := children.hosts()) is None:
        if children.refusal is not None:
            children.send({"refused": children.refusal})
            # Others may still try to reach a parent that was refused, and must not wait for process 0 then.
            _handle_events(selector, _shortcut_seconds(limit_seconds) + _REPORT_SECONDS)
            raise UserError(children.refusal)
        waited = time.monotonic() - begin
        missing = _names(numbers_in(children.missing())) if waited >= min(report, limit_seconds) else ""
        if waited >= limit_seconds:
            failure = resolution_failure(host_and_port(group.coordinator)[0])
            raise PeerTimeout(
                f"process 0 of {group.num_processes} on {host} waited {limit_seconds:.0f} s at "
                f"{group.coordinator} for {missing}" + (f"; {failure}" if failure else "")
            )
        if missing:
            children.send({"missing": missing})
            report = 2 * waited
        wait_for_events(selector, min(report, limit_seconds) - waited)
    return hosts


def _handle_events(selector: selectors.BaseSelector, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        wait_for_events(selector, left)


def _bind(coordinator: str) -> socket.socket:
    port = host_and_port(coordinator)[1]
    deadline = time.monotonic() + _BIND_SECONDS
    while True:
        try:
            return listen(coordinator, port)
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"process 0 cannot listen at port {port} of {coordinator} ({error.strerror}); choose "
                    "another port for --coordinator"
                ) from error
            time.sleep(_POLL_SECONDS)


# Other processes


def _listen_for_children(group: ProcessGroup) -> socket.socket:
    if group.hosts:
        # In use, for example by another run. The children then come by way of process 0.
        with contextlib.suppress(OSError):
            return listen(group.coordinator, parent_port(group.coordinator, group.process))
    return listen(group.coordinator)


class _Joining:
    """The way of a process to its parent, and what it knows until all are connected.

    Args:
      group: processes of the run.
      place: place of this process in the tree.
      host: name of this process' host.
      selector: calls back when something arrives.
      children: children of this process.
      limit_seconds: time limit in seconds.
    """

    def __init__(
        self,
        group: ProcessGroup,
        place: Place,
        host: str,
        selector: selectors.BaseSelector,
        children: ChildRegistry,
        limit_seconds: float,
    ):
        self._group, self._place, self._host = group, place, host
        self._selector, self._children, self._limit_seconds = selector, children, limit_seconds
        self._begin = time.monotonic()
        # Derived address of the parent; None from when this process was accepted, or has given it up.
        self._shortcut: tuple[str, int] | None = None
        if place.parent and group.hosts:
            self._shortcut = group.hosts[place.parent], parent_port(group.coordinator, place.parent)
        self._shortcut_end = self._begin + _shortcut_seconds(limit_seconds)
        # The process with which this one is connected: process 0, the parent, or one in between.
        self._contact, self._connection = 0, None
        self._attempt_at = self._report_at = 0.0
        self._pause, self._share_at = _MIN_PAUSE_SECONDS, self._begin + _REPORT_SECONDS
        # Why this process waits, for an error message.
        self._obstacle = ""
        self._reported: dict[str, Any] | None = None
        self._hosts: list[str] | None = None
        self._num_messages = 0

    def join(self) -> Assembly:
        """Connects with the parent, and waits for the outcome.

        Raises:
          PeerTimeout: if processes are late.
          UserError: if this process is rejected.
        """
        try:
            while self._hosts is None:
                self._check_time()
                if self._connection is None and time.monotonic() >= self._attempt_at:
                    self._begin_again()
                self._report()
                self._share_obstacle()
                if self._hosts is None:
                    wait_for_events(self._selector, self._seconds_to_wait())
        except BaseException:
            self._leave()
            raise
        assert self._connection is not None
        self._selector.unregister(self._connection.socket)
        self._children.stop()
        self._children.send({"hosts": self._hosts})
        connections = {self._contact: self._connection, **self._children.connections}
        num_messages = self._num_messages + self._children.num_messages
        return Assembly(self._place, tuple(self._hosts), connections, num_messages)

    def _check_time(self) -> None:
        """Gives up the shortcut after its time, and ends this process at its limit.

        It ends somewhat later if it is connected: process 0 then sends the names of late ones.

        Raises:
          PeerTimeout: at the limit.
        """
        if self._shortcut is not None and time.monotonic() > self._shortcut_end:
            self._give_up_shortcut()
        limit = self._limit_seconds + (_GRACE_SECONDS if self._connection is not None else 0.0)
        if time.monotonic() - self._begin > limit:
            self._share_obstacle(at_once=True)
            raise PeerTimeout(
                f"process {self._group.process} of {self._group.num_processes} on {self._host} waited "
                f"{self._limit_seconds:.0f} s for process 0: {self._obstacle}"
            )

    def _seconds_to_wait(self) -> float:
        if self._connection is not None:
            return _POLL_SECONDS
        return min(_POLL_SECONDS, self._attempt_at - time.monotonic())

    def _begin_again(self) -> None:
        """Connects with the parent, or with process 0."""
        if self._shortcut is None:
            self._begin_at_process_0()
            return
        assert self._place.parent is not None
        self._attempt_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _POLL_SECONDS)
        try:
            self._connect(self._place.parent, *self._shortcut, self._group.coordinator, _CONNECT_SECONDS)
        except ConnectionRefusedError:
            # It may have to start.
            pass
        except OSError:
            self._give_up_shortcut()

    def _give_up_shortcut(self) -> None:
        self._leave()
        self._shortcut, self._attempt_at = None, 0.0

    def _begin_at_process_0(self) -> None:
        # A service that closes each connection at once must not be asked without a pause.
        self._attempt_at = time.monotonic() + _POLL_SECONDS
        host, port = host_and_port(self._group.coordinator)
        failure = resolution_failure(host)
        if failure is not None:
            self._obstacle = failure
            return
        try:
            self._connect(0, host, port, "")
            # Until it answers. A process of the previous attempt may hold the port, too.
            self._obstacle = f"the service at {self._group.coordinator} is not process 0 of this run"
        except TimeoutError:
            self._obstacle = self._obstacle or f"{self._group.coordinator} does not answer"
        except ConnectionResetError:
            pass
        except OSError as error:
            self._obstacle = f"nothing listens at {self._group.coordinator} ({error.strerror or error})"

    def _connect(self, contact: int, host: str, port: int, run: str, seconds: float = SEND_SECONDS) -> None:
        """Connects with the parent, or a process on the way to it.

        Raises:
          OSError: if it does not answer.
        """
        hello = Hello(
            process=self._group.process,
            num_processes=self._group.num_processes,
            host=self._host,
            port=self._children.port,
            receiver=host,
            coordinator=self._group.coordinator,
            run=run,
        )
        connection = PeerConnection(socket.create_connection((host, port), seconds))
        try:
            connection.send(hello._asdict())
        except OSError:
            connection.close()
            raise
        self._contact, self._connection, self._reported = contact, connection, None
        # Most subtrees are complete before a first report of what is missing.
        self._report_at = time.monotonic() + _REPORT_SECONDS
        self._num_messages += 1
        self._selector.register(connection.socket, selectors.EVENT_READ, self._read)

    def _read(self) -> None:
        connection = self._connection
        assert connection is not None
        try:
            connection.fill()
            # What follows the list of hosts is read after the rendezvous.
            while self._hosts is None and self._connection is connection:
                message = connection.next_message()
                if message is None:
                    return
                self._num_messages += 1
                self._handle(message)
        except OSError:
            if self._shortcut is None:
                self._leave()
            else:
                self._give_up_shortcut()

    def _handle(self, message: dict[str, Any]) -> None:
        """Handles a message from above.

        Raises:
          ConnectionError: if another program sends it, which listens where the parent should.
        """
        if "accepted" in message:
            self._shortcut = None
            way = f"process {self._contact}, which connects it with process 0, has not reached it"
            self._obstacle = message["accepted"] or way
        elif self._shortcut is not None:
            # Or a process of the previous attempt, which knows an earlier process of this number.
            raise ConnectionError("this is not the parent")
        elif "obstacle" in message:
            self._obstacle = message["obstacle"]
        elif "hosts" in message:
            self._hosts = message["hosts"]
        elif "next" in message:
            self._go_on(message["process"], *message["next"])
        else:
            # What all must know goes down the tree.
            self._children.send(message)
            _raise_outcome(message)
            self._obstacle = (
                f"it is running at {self._group.coordinator} and waiting for {message.get('missing')}"
            )

    def _go_on(self, contact: int, host: str, port: int, run: str) -> None:
        """Connects with the next process on the way to the parent; begins again later if that has ended."""
        self._leave()
        # If the connection works, only its end can be an obstacle.
        reason = "it has ended"
        try:
            self._connect(contact, host, port, run)
        except OSError as error:
            reason = error.strerror or str(error)
        way = f"process {contact} at {host}:{port}, which connects it with process 0"
        self._obstacle = f"{way}, does not answer: {reason}"

    def _report(self) -> None:
        """Sends the parent the hosts of the subtree, or which processes are missing there.

        Another process, in which this one waits for the next, receives which are present: it has no list.
        """
        if self._connection is None or self._shortcut is not None or not self._place.children:
            return
        if self._contact == self._place.parent:
            hosts = self._children.hosts()
            report = {"missing": self._children.missing()} if hosts is None else {"hosts": hosts}
        else:
            hosts, report = None, {"present": self._children.present()}
        # At once if the subtree is complete, or not any more.
        is_urgent = hosts is not None or (self._reported is not None and "hosts" in self._reported)
        if report == self._reported or (not is_urgent and time.monotonic() < self._report_at):
            return
        with contextlib.suppress(OSError):  # the next read notices that the connection has ended
            self._connection.send(report)
            self._num_messages += 1
        self._reported, self._report_at = report, time.monotonic() + _REPORT_SECONDS

    def _share_obstacle(self, *, at_once: bool = False) -> None:
        """Sends the children what keeps this process from process 0, if that is new."""
        if self._obstacle == self._children.obstacle or not (at_once or time.monotonic() >= self._share_at):
            return
        self._children.obstacle, self._share_at = self._obstacle, time.monotonic() + _REPORT_SECONDS
        self._children.send({"obstacle": self._obstacle})

    def _leave(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection.socket)
            self._connection.close()
            self._connection = None


def _raise_outcome(message: Mapping[str, Any]) -> None:
    """Raises the error of a message.

    Raises:
      PeerTimeout: if processes are late.
      UserError: if a process was started with inconsistent numbers.
    """
    if "refused" in message:
        raise UserError(message["refused"])
    if "late" in message:
        raise PeerTimeout(message["late"])

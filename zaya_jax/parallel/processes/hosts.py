"""Membership of a run with several processes, and small messages between these processes.

Messages go over a tree of TCP connections (`zaya_jax.parallel.processes.tree`): a few bytes at the start, at
a checkpoint, and at the end. Every wait has a time limit, and its error names the processes that are late. In
a run of one process every function works without connections.
"""

import atexit
import contextlib
import dataclasses
import importlib.metadata
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from zaya_jax.errors import DAMAGED, RESUMABLE, TIMED_OUT, UserError, exit_code_of
from zaya_jax.parallel.processes import coordination_service
from zaya_jax.parallel.processes.errors import CollectiveError, PeerLost, PeerTimeout
from zaya_jax.parallel.processes.liveness import Liveness
from zaya_jax.parallel.processes.process_group import ProcessGroup, host_name
from zaya_jax.parallel.processes.rendezvous import Assembly, assembled
from zaya_jax.parallel.processes.tree.exchanges import RESUME, Exchanges, first_known, join
from zaya_jax.parallel.processes.tree.links import TreeLinks

LIMIT_SECONDS = 300.0
"""Default time limit for waits on other processes; a process that is silent for so long counts as lost."""
WATCHED_SECONDS = 24 * 3600.0
"""Time limit for collectives in runs with a watchdog, which has its own, tighter limit for each section."""
# Time that processes wait for each other after a signal; compiled code must return before Python handles it.
_LEAVING_SECONDS = 5.0
# Matches errors of communication libraries after a peer has ended.
_LOST = re.compile(r"gloo|nccl|rccl|connection (reset|refused|closed)|peer|UNAVAILABLE", re.IGNORECASE)
# Matches gloo's error for a peer that did not send in time; the peer may still be running.
_TIMED_OUT = re.compile(r"timed out waiting (\d+)ms", re.IGNORECASE)
_COLLECTIVE_TIMEOUTS = (
    "xla_cpu_collective_timeout_seconds",
    "xla_cpu_collective_call_terminate_timeout_seconds",
)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class StartCost:
    """What the parts of this process' start have taken.

    Attributes:
      begin: time at which the rendezvous began, on the monotonic clock.
      rendezvous: seconds until all processes had started and this one was connected in the tree.
      rendezvous_cpu: CPU seconds of this process for that, without those for jax's service.
      messages: messages that this process sent and received for that.
      service: seconds until this process was connected with jax's coordination service, after that.
      service_cpu: CPU seconds of this process for that; in process 0 with those to start the service.
    """

    begin: float
    rendezvous: float
    rendezvous_cpu: float
    messages: int
    service: float
    service_cpu: float


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Messages over the tree that this process has sent to and received from others, without signs of life.

    Attributes:
      messages: number of messages.
      num_bytes: bytes of these messages.
    """

    messages: int
    num_bytes: int


@dataclasses.dataclass
class _State:
    """Membership and message state of this process."""

    limit_seconds: float = LIMIT_SECONDS
    hosts: tuple[str, ...] = ()
    """Host names by process number; empty in a run of one process."""
    start_cost: StartCost | None = None
    links: TreeLinks | None = None
    exchanges: Exchanges | None = None
    liveness: Liveness | None = None
    """As links and exchanges, None in a run of one process."""
    is_leaving: bool = False
    """Whether the process is ending for a reason that it reports itself."""


_state = _State()


# Joining and leaving


@contextlib.contextmanager
def joined(
    group: ProcessGroup | None,
    *,
    limit_seconds: float = LIMIT_SECONDS,
    collective_seconds: float | None = None,
) -> Iterator[None]:
    """Makes this process a member of a run for the duration of the context; only process 0 prints to stdout.

    Args:
      group: processes of the run; None for a run of one process.
      limit_seconds: see `start`.
      collective_seconds: see `start`.

    Raises:
      PeerTimeout: if other processes do not start in time.
      PeerLost: if another process ends during the run.
    """
    if group is None:
        yield
        return
    start(group, limit_seconds=limit_seconds, collective_seconds=collective_seconds)
    with contextlib.ExitStack() as output:
        if not is_first():
            output.enter_context(contextlib.redirect_stdout(output.enter_context(open(os.devnull, "w"))))
        try:
            yield
        except CollectiveError:  # raised by all processes, so that all of them get here
            _disconnect()
            raise
        except jax.errors.JaxRuntimeError as error:
            peer_error = _peer_error(error)
            _detach(1 if peer_error is None else peer_error.exit_code)
            if peer_error is None:
                raise
            raise peer_error from error
        except (SystemExit, KeyboardInterrupt):  # a signal, which the other processes usually get too
            _leave_after_signal()
            raise
        except BaseException as error:
            code = exit_code_of(error)
            _detach(1 if code is None else code)
            raise
        _disconnect()


def _peer_error(error: Exception) -> PeerTimeout | PeerLost | None:
    """Returns what a collective's error says about another process; None if it has another cause."""
    if (timed_out := _TIMED_OUT.search(str(error))) is not None:
        seconds = int(timed_out[1]) // 1000
        return PeerTimeout(f"waited {seconds} s in a collective for another process; {RESUME}")
    if _LOST.search(str(error)) is not None:
        return PeerLost(f"another process of this run is gone; {RESUME}")
    return None


def _leave_after_signal() -> None:
    """Disconnects from the other processes if they leave as well, and ends without them otherwise.

    Posting a message and exiting is not enough: jax reports a process as lost if it is still shutting down
    when process 0 ends the service.
    """
    try:
        meet("leaving", limit_seconds=_LEAVING_SECONDS)
        coordination_service.state().shutdown()
    except (PeerTimeout, PeerLost, jax.errors.JaxRuntimeError):
        _detach(RESUMABLE)


def _disconnect() -> None:
    """Disconnects after all work is done, and waits for the other processes as jax would at Python's exit.

    It must happen here: lost processes that jax reports can be handled only while Python is running.
    """
    if _state.liveness is not None:
        _state.liveness.stop()
    try:
        coordination_service.state().shutdown()
    except jax.errors.JaxRuntimeError:  # another process did not come; the work of this one is complete
        _state.is_leaving = True
        coordination_service.detach()
    if _state.links is not None:
        _state.links.close()


def _detach(code: int) -> None:
    """Ends this process without waiting for the others, after its error is printed.

    Args:
      code: exit code.
    """
    _state.is_leaving = True
    coordination_service.detach()
    # Runs before Python's other exit handlers: threads of jax that call into a finalizing Python crash it.
    atexit.register(_exit, code)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or a pipe without a reader
            stream.flush()
    os._exit(code)


def _on_loss() -> None:
    """Ends this process after jax reports a lost peer.

    Runs in a thread of jax, because the main thread may be blocked in a collective that never completes.
    """
    if _state.is_leaving:
        coordination_service.pause_thread()  # the main thread reports its own reason and exit code
    assert _state.liveness is not None
    message = f"zaya: {_state.liveness.describe_loss()}; {RESUME}\n"
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, message.encode())
    os._exit(RESUMABLE)


def start(
    group: ProcessGroup, *, limit_seconds: float = LIMIT_SECONDS, collective_seconds: float | None = None
) -> None:
    """Joins the processes of a run. Must be called before jax initializes its devices.

    Args:
      group: processes of the run.
      limit_seconds: time limit in seconds for waits on other processes, now and later.
      collective_seconds: time limit in seconds for collectives on CPUs; None for `limit_seconds`.

    Raises:
      PeerTimeout: if other processes do not start in time.
      UserError: if the processes were started with inconsistent numbers.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # `stop_agreement` chooses the step at which all stop; jax's own service would take SIGTERM from Python.
    jax.config.update("jax_enable_preemption_service", False)
    _set_collective_timeout(limit_seconds if collective_seconds is None else collective_seconds)
    _state.limit_seconds = limit_seconds
    begun, begun_cpu, first_cpu = time.monotonic(), time.process_time(), 0.0
    with (
        # First, because it starts while the other processes come.
        coordination_service.service_process(group, limit_seconds=limit_seconds) as service,
        assembled(group, host=host_name(os.environ), limit_seconds=limit_seconds) as assembly,
    ):
        _state.hosts = assembly.hosts
        if service is not None:
            first_cpu = time.process_time()
            coordination_service.start_service(service)
            first_cpu = time.process_time() - first_cpu
    met, cpu = time.monotonic(), time.process_time() - begun_cpu - first_cpu
    try:
        coordination_service.connect(group, limit_seconds=limit_seconds, on_loss=_on_loss)
    except RuntimeError as error:
        _detach(TIMED_OUT)
        raise PeerTimeout(
            f"process {group.process} of {group.num_processes} waited {limit_seconds:.0f} s for the others "
            f"at {group.coordinator}: all of them started, and some have ended since"
        ) from error
    _state.start_cost = StartCost(
        begin=begun,
        rendezvous=met - begun,
        rendezvous_cpu=cpu,
        messages=assembly.num_messages,
        service=time.monotonic() - met,
        service_cpu=time.process_time() - begun_cpu - cpu,
    )
    _begin_exchanges(group, assembly, limit_seconds=limit_seconds)


def _begin_exchanges(group: ProcessGroup, assembly: Assembly, *, limit_seconds: float) -> None:
    if group.num_processes > 1:
        # After jax's service has connected: until then messages wait in the buffers of the kernel.
        _state.links = TreeLinks(assembly.place, assembly.connections)
        _state.exchanges = Exchanges(_state.links, describe, limit_seconds=limit_seconds)
        _state.liveness = Liveness(_state.links, group, describe, limit_seconds=limit_seconds)


def _set_collective_timeout(seconds: float) -> None:
    """Sets the time limit of CPU collectives: with XLA's default of 30 s a short pause would end the run."""
    # The plugin of a GPU reads the same variable, and ends the process at a flag that it does not know.
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms != "cpu" and importlib.metadata.entry_points(group="jax_plugins"):
        return
    flags = os.environ.get("XLA_FLAGS", "")
    ours = [f"--{name}={max(1, int(seconds))}" for name in _COLLECTIVE_TIMEOUTS if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *ours]).strip()


# Identity


def process() -> int:
    """Returns the number of this process, counted from 0."""
    return coordination_service.state().process_id


def num_processes() -> int:
    """Returns the number of processes of the run."""
    return coordination_service.state().num_processes


def is_first() -> bool:
    """Returns whether this is process 0, which prints and writes the files that exist once per run."""
    return process() == 0


def host_names() -> tuple[str, ...]:
    """Returns the host names of all processes, by process number."""
    return _state.hosts or (host_name(os.environ),)


def describe(number: int) -> str:
    """Returns a process and its host as text, such as "process 3 on node7"."""
    return f"process {number} on {_state.hosts[number]}" if _state.hosts else f"process {number}"


def start_cost() -> StartCost | None:
    """Returns what the start of this process has taken; None in a run of one process."""
    return _state.start_cost


def traffic() -> Traffic:
    """Returns how much this process has exchanged with others since its start."""
    links = _state.links
    if links is None:
        return Traffic(0, 0)
    return Traffic(links.num_sent + links.num_received, links.bytes_sent + links.bytes_received)


# Exchanges in which all processes take part


def gather(name: str, value: Any, *, limit_seconds: float | None = None) -> list[Any]:
    """Gathers one value from each process. Where a merged value is enough, `reduce` sends fewer bytes.

    Args:
      name: name of the exchange. All processes must make exchanges with the same names in the same order.
      value: JSON value of this process.
      limit_seconds: time limit in seconds; None for the limit of the run.

    Returns:
      Values by process number, the same list in all processes.

    Raises:
      PeerTimeout: if some processes do not take part in time.
      PeerLost: if the connection with another process is lost.
    """
    return reduce(name, [value], join, limit_seconds=limit_seconds)


def gather_to_first(name: str, values: list[Any], *, limit_seconds: float | None = None) -> list[Any] | None:
    """Joins the lists of all processes in process 0, otherwise as `gather`; the others wait and get None."""
    if _state.exchanges is None:
        return values
    return _state.exchanges.reduce(name, values, join, limit_seconds=limit_seconds, to_all=False)


def reduce(
    name: str, value: Any, merge: Callable[[list[Any]], Any], *, limit_seconds: float | None = None
) -> Any:
    """Merges one value from each process on the way to process 0, and returns the result in all of them.

    Args:
      name: see `gather`.
      value: JSON value of this process.
      merge: function from a list of values of consecutive processes to one value, such as `max`. A merged
        value may be merged again.
      limit_seconds: see `gather`.

    Raises:
      PeerTimeout: if some processes do not take part in time.
      PeerLost: if the connection with another process is lost.
    """
    if _state.exchanges is None:
        return value
    return _state.exchanges.reduce(name, value, merge, limit_seconds=limit_seconds)


def meet(name: str, *, limit_seconds: float | None = None) -> None:
    """Waits until all processes are at this call; see `reduce`."""
    reduce(name, None, first_known, limit_seconds=limit_seconds)


def gather_available(name: str, value: Any, *, limit_seconds: float) -> dict[int, Any]:
    """Gathers values from the processes that are not late.

    Returns:
      Values by process number, with None for processes that are late. It has no entries for processes whose
      values pass a late one on their way to process 0.

    Raises:
      PeerTimeout: if process 0, which collects the values, is late.
      PeerLost: if the connection with another process is lost.
    """
    if _state.exchanges is None:
        return {0: value}
    return _state.exchanges.available(name, value, limit_seconds=limit_seconds)


def broadcast_from_first(name: str, value: Any, *, limit_seconds: float | None = None) -> Any:
    """Returns the JSON value of process 0 in all processes; the others' values are ignored.

    Raises:
      PeerTimeout: if process 0 does not send its value in time.
      PeerLost: if the connection with another process is lost.
    """
    if _state.exchanges is None:
        return value
    return _state.exchanges.broadcast(name, value, limit_seconds=limit_seconds)


def run_on_all(
    name: str, work: Callable[[], T], *, limit_seconds: float | None = None, is_printed_by_all: bool = False
) -> T:
    """Calls a function in every process; if it fails in one of them, all raise that failure.

    Args:
      name: see `gather`.
      work: function to call.
      limit_seconds: see `gather`.
      is_printed_by_all: whether each process prints a failure, instead of process 0 for all.

    Returns:
      The function's result in this process.

    Raises:
      CollectiveError: with the message of the first process that raised a UserError or an OSError.
      PeerTimeout: if some processes do not finish in time.
    """
    if num_processes() == 1:
        return work()
    result, error = None, None
    try:
        result = work()
    except (UserError, OSError) as failure:
        error = failure
    outcome = None if error is None else [process(), error_message(error), exit_code_of(error) == DAMAGED]
    failure = reduce(name, outcome, first_known, limit_seconds=limit_seconds)
    if failure is not None:
        number, message, is_damage = failure
        message = message if number == 0 else f"{describe(number)}: {message}"
        is_printed_here = is_printed_by_all or is_first()
        raise CollectiveError(message, is_printed_here=is_printed_here, is_damage=is_damage) from error
    return result  # pyright: ignore[reportReturnType]


def run_on_first(name: str, work: Callable[[], T], *, limit_seconds: float | None = None) -> T | None:
    """Calls a function in process 0 while the others wait; these get None.

    Raises:
      CollectiveError: with the message of process 0, if it raised a UserError or an OSError.
      PeerTimeout: if process 0 does not finish in time.
    """
    return run_on_all(name, work if is_first() else lambda: None, limit_seconds=limit_seconds)


def collective_error(message: str) -> CollectiveError:
    """Returns the error for a failure that every process detects by itself; only process 0 prints it."""
    return CollectiveError(message, is_printed_here=is_first())


def error_message(error: Exception) -> str:
    """Returns the message of an error; for an error of the operating system, with the file's name."""
    if isinstance(error, CollectiveError):  # without its advice, which the new error adds once
        return error.message
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


# Messages of single processes


def post(key: str, message: str) -> None:
    """Posts a message to all processes, without waiting. Of several, the first in process 0 counts.

    It comes back to this process, too: `wait_for_post` then returns it.
    """
    assert _state.exchanges is not None, "a run of one process has nobody to post to"
    _state.exchanges.post(key, message)


def wait_for_post(key: str, *, limit_seconds: float) -> str | None:
    """Waits for a posted message; returns None if there is none within the time limit."""
    assert _state.exchanges is not None, "in a run of one process nobody posts"
    return _state.exchanges.wait_for_post(key, limit_seconds=limit_seconds)

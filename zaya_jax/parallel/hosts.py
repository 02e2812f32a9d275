"""The processes of a run and what they say to each other, beside what their devices exchange.

Words go through the coordination service of `jax.distributed`, which process 0 has: a few bytes at the
start, at a checkpoint, at the end. Every wait has a limit and names who is late. A process that is alone
hears itself.
"""

import collections
import contextlib
import ctypes
import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax._src import distributed  # the public module starts the service, and says nothing through it

from zaya_jax.parallel.failures import Late, Lost, Shared
from zaya_jax.parallel.process_group import ProcessGroup, host_name

LIMIT_SECONDS = 300.0
"""Of a wait for other processes, if nothing else is said."""
HEARTBEAT_SECONDS = 100
"""Without a sign of life from a process, all others end; a shorter limit makes this shorter too."""
_POLL_SECONDS = 0.02
_LEAVING_SECONDS = 5.0
"""That all wait for each other at a signal; who is in compiled code hears of it only behind that."""
_LOST = re.compile(r"gloo|nccl|rccl|connection (reset|refused|closed)|peer|UNAVAILABLE", re.IGNORECASE)
"""In what a device's library says when one that it speaks to has gone."""
_GONE = "another process of this run is gone; the same command goes on from the last step that was saved"
T = TypeVar("T")


@dataclasses.dataclass
class _Words:
    """What this process has said and heard so far."""

    limit_seconds: float = LIMIT_SECONDS
    hosts: tuple[str, ...] = ()
    """By process; empty for one that is alone."""
    numbers: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    """How often each name was used: the service refuses a second word under one key."""


_words = _Words()


@contextlib.contextmanager
def joined(group: ProcessGroup | None, *, limit_seconds: float = LIMIT_SECONDS) -> Iterator[None]:
    """Is one of the processes of a run, of which process 0 prints; None is a process that is alone.

    Raises:
      Late: if others do not come.
      Lost: if one has gone later.
    """
    if group is None:
        yield
        return
    start(group, limit_seconds=limit_seconds)
    with contextlib.ExitStack() as output:
        if not is_first():
            output.enter_context(contextlib.redirect_stdout(output.enter_context(open(os.devnull, "w"))))
        try:
            yield
        except Shared:  # all processes leave so
            raise
        except jax.errors.JaxRuntimeError as error:
            _abandon()
            if _LOST.search(str(error)) is None:
                raise
            raise Lost(_GONE) from error
        except (SystemExit, KeyboardInterrupt):  # a signal, which others were given too
            _leave_together()
            raise
        except BaseException:
            _abandon()
            raise


def _leave_together() -> None:
    """Parts from the others in good order, if all were told to leave.

    A word and an exit are not enough: jax aborts a process that is still on its way out when the service of
    process 0 ends, and its exit code then says nothing.
    """
    try:
        gather("leaving", None, limit_seconds=_LEAVING_SECONDS)
        distributed.global_state.shutdown()
    except (Late, jax.errors.JaxRuntimeError):
        _abandon()


def _abandon() -> None:
    """Leaves without the others: at its exit jax would wait for them, who may wait in a collective."""
    state = distributed.global_state
    for each in (state.client, state.service):
        # Kept for ever: closed in good order, also by Python's own end, a client waits for the others, and
        # aborts the process if the service was closed before it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    state.client = state.service = None


def start(group: ProcessGroup, *, limit_seconds: float = LIMIT_SECONDS) -> None:
    """Joins the processes of a run; to be called before jax looks for devices.

    Args:
      group: who they are.
      limit_seconds: how long a process waits for others, here and later.

    Raises:
      Late: if they do not come.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # All agree here on the step at which they stop; jax's own way takes SIGTERM away from Python.
    jax.config.update("jax_enable_preemption_service", False)
    _words.limit_seconds = limit_seconds
    try:
        jax.distributed.initialize(
            group.coordinator,
            group.num_processes,
            group.process,
            group.local_device,
            cluster_detection_method="deactivate",  # it was found already
            initialization_timeout=max(1, int(limit_seconds)),
            heartbeat_timeout_seconds=max(1, min(HEARTBEAT_SECONDS, int(limit_seconds))),
            shutdown_timeout_seconds=max(1, int(limit_seconds)),
            coordinator_bind_address=_bind_address(group.coordinator),
        )
    except jax.errors.JaxRuntimeError as error:
        raise Late(
            f"process {group.process} of {group.num_processes} has waited {limit_seconds:.0f} s for the "
            f"others at {group.coordinator}"
        ) from error
    _words.hosts = tuple(gather("hosts", host_name(os.environ)))


def _bind_address(coordinator: str) -> str:
    """All of a host's addresses, as jax would; but what is meant for this host alone stays on it."""
    host, _, port = coordinator.rpartition(":")
    return coordinator if host in ("127.0.0.1", "localhost") else f"[::]:{port}"


def process() -> int:
    """The number of this process, from 0."""
    return distributed.global_state.process_id


def num_processes() -> int:
    """How many processes the run has."""
    return distributed.global_state.num_processes


def is_first() -> bool:
    """Whether this is the process that prints, and writes what is written once."""
    return process() == 0


def names() -> tuple[str, ...]:
    """The hosts of all processes, in the order of their numbers."""
    return _words.hosts or (host_name(os.environ),)


def describe(number: int) -> str:
    """A process and the host that it runs on."""
    return f"process {number} on {_words.hosts[number]}" if _words.hosts else f"process {number}"


def gather(name: str, value: Any, *, limit_seconds: float | None = None) -> list[Any]:
    """What each process has said under a name, in the order of their numbers.

    Args:
      name: of what is said. All processes must say the same names in the same order.
      value: JSON.
      limit_seconds: of the wait; None for the run's.

    Raises:
      Late: if some have said nothing within the limit.
    """
    found = _exchange(name, value, limit_seconds)
    late = [describe(number) for number, said in enumerate(found) if said is None]
    if late:
        raise Late(f"waited {_limit(limit_seconds):.0f} s at {name} for {', '.join(late)}")
    return [said[0] for said in found if said is not None]


def answers(name: str, value: Any, *, limit_seconds: float) -> list[Any]:
    """As `gather`, with None for each process that has said nothing within the limit.

    Raises:
      Late: if process 0, which collects what is said, is one of them.
    """
    return [None if said is None else said[0] for said in _exchange(name, value, limit_seconds)]


def from_first(name: str, value: Any, *, limit_seconds: float | None = None) -> Any:
    """What process 0 has said under a name; the others' values are not looked at.

    Raises:
      Late: if it has said nothing within the limit.
    """
    if num_processes() == 1:
        return value
    place = _place(name)
    if is_first():
        _client().key_value_set(place, json.dumps(value))
        return value
    return json.loads(_wait_for_first(place, name, limit_seconds))


def together(name: str, work: Callable[[], T], *, limit_seconds: float | None = None) -> T:
    """Has every process do something; if one cannot, all of them raise its sentence.

    Raises:
      Shared: with the sentence of the first that raised a ValueError or an OSError.
      Late: if some are not done within the limit.
    """
    if num_processes() == 1:
        return work()
    done, error = _try(work)
    said = gather(name, None if error is None else _describe(error), limit_seconds=limit_seconds)
    for number, failure in enumerate(said):
        if failure is not None:
            what, is_damage = failure
            what = what if number == 0 else f"{describe(number)}: {what}"
            raise Shared(what, is_told_here=is_first(), is_damage=is_damage) from error
    assert not isinstance(done, Exception)
    return done  # pyright: ignore[reportReturnType]


def first_does(name: str, work: Callable[[], T], *, limit_seconds: float | None = None) -> T | None:
    """Has process 0 do something while the others wait; they get None.

    Raises:
      Shared: with its sentence, if it raised a ValueError or an OSError.
      Late: if it is not done within the limit.
    """
    return together(name, work if is_first() else lambda: None, limit_seconds=limit_seconds)


def shared(what: str) -> Shared:
    """The error that all processes raise, each for itself, for what all of them find alike."""
    return Shared(what, is_told_here=is_first())


def say_once(key: str, word: str) -> None:
    """Says a word that any process may say; of several the first one counts."""
    # The service refuses a second word, or answers no more: in both cases there is nothing to be done here.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _client().key_value_set(key, word)


def heard(key: str, *, limit_seconds: float) -> str | None:
    """The word that some process said; None if nobody did within the limit."""
    try:
        return _client().blocking_key_value_get(key, int(1000 * limit_seconds))
    except jax.errors.JaxRuntimeError:
        time.sleep(_POLL_SECONDS)  # a service that is gone answers at once
        return None


def forget(key: str) -> None:
    """Takes a word away that was heard, for the service keeps it for ever."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _client().key_value_delete(key)


def _try(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except (ValueError, OSError) as error:
        return None, error


def _describe(error: Exception) -> tuple[str, bool]:
    """Its sentence, and whether it is one of damage."""
    return sentence(error), getattr(error, "is_damage", False)


def sentence(error: Exception) -> str:
    """What an error says, with the file of one of the system."""
    if isinstance(error, Shared):  # what to do about it is said once, by whoever raises it for all
        return error.what
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _place(name: str) -> str:
    number = _words.numbers[name]
    _words.numbers[name] += 1
    return f"zaya/{name}/{number}"


def _client() -> Any:
    client = distributed.global_state.client
    assert client is not None, "a process that is alone has nobody to speak to"
    return client


def _exchange(name: str, value: Any, limit_seconds: float | None) -> list[list[Any] | None]:
    """What each process has said, in a list of its own; None for one that said nothing within the limit."""
    if num_processes() == 1:
        return [[value]]
    place, before = _place(name), f"zaya/{name}/{_words.numbers[name] - 2}"
    _client().key_value_set(f"{place}/said/{process()}", json.dumps([value]))
    # One asks for all, and tells all: of a thousand processes that each ask for all, the service would die.
    if is_first():
        _client().key_value_set(f"{place}/all", json.dumps(_collect(place, _limit(limit_seconds))))
        # All have come here, and so have heard what was told before: the service keeps a word for ever.
        _client().key_value_delete(before)
    return json.loads(_wait_for_first(f"{place}/all", name, limit_seconds))


def _limit(limit_seconds: float | None) -> float:
    return _words.limit_seconds if limit_seconds is None else limit_seconds


def _collect(place: str, limit: float) -> list[list[Any] | None]:
    """What was said, as soon as all have, or at the limit."""
    deadline, pause = time.monotonic() + limit, _POLL_SECONDS / 20
    while True:
        said = {
            int(key.rsplit("/", 1)[1]): value for key, value in _client().key_value_dir_get(f"{place}/said/")
        }
        if len(said) == num_processes() or time.monotonic() > deadline:
            return [json.loads(said[number]) if number in said else None for number in range(num_processes())]
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)


def _wait_for_first(place: str, name: str, limit_seconds: float | None) -> str:
    limit = _limit(limit_seconds)
    try:
        # Its own wait for others ends first, so that its sentence is heard, which knows who is late.
        return _client().blocking_key_value_get(place, int(1000 * (limit + 5)))
    except jax.errors.JaxRuntimeError as error:
        raise Late(f"waited {limit:.0f} s at {name} for {describe(0)}") from error

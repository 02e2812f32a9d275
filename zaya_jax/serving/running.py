"""A server as a process: it listens at once, loads its run, answers until it is told to end, and drains."""

import asyncio
import contextlib
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from zaya_jax.inference.engine import EngineThread
from zaya_jax.serving.application import make_application
from zaya_jax.serving.connection import Connection
from zaya_jax.serving.limits import ServingLimits
from zaya_jax.serving.served import ServedRun
from zaya_jax.serving.service import Service

CLOSING_SECONDS = 5
"""For answers that were ended to leave, once nothing else is waited for."""
MOST_CONNECTIONS = 4096


class _Uvicorn(uvicorn.Server):
    """uvicorn, which leaves signals to us: it would end what runs, where we first drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none of the signals."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
      ValueError: for an address that cannot be had.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"--port is {port}; it must be 0 to {2**16 - 1}")
    try:
        # The first of its addresses; create_server knows how to take one over that was just given up.
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ValueError(
            f"{host}:{port} cannot be had ({error.strerror}); give another --host or --port"
        ) from error


def run_server(
    load: Callable[[], ServedRun],
    listening: socket.socket,
    limits: ServingLimits,
    *,
    key: str | None,
    host: str,
    origins: Sequence[str],
) -> None:
    """Serves until SIGTERM or SIGINT; a second one does not wait for answers.

    Args:
      load: gives what is served; `/health` says meanwhile that it loads.
      listening: where clients come.
      limits: of requests.
      key: that clients must send; None for none.
      host: that the socket listens at.
      origins: of pages that may ask from a browser.

    Raises:
      ValueError: whatever `load` raises.
    """
    asyncio.run(_serve(load, listening, limits, key=key, host=host, origins=origins))


async def _serve(
    load: Callable[[], ServedRun],
    listening: socket.socket,
    limits: ServingLimits,
    *,
    key: str | None,
    host: str,
    origins: Sequence[str],
) -> None:
    service = Service(limits)
    application = make_application(service, key=key, host=host, origins=origins)
    server = _Uvicorn(_uvicorn_config(application, limits))
    asked_to_end = _signals()
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        served = await _loaded(load, asked_to_end)
        if served is not None:
            await _answer_until_asked_to_end(service, served, listening, asked_to_end)
    finally:
        server.should_exit = True
        await serving
        service.close()


async def _answer_until_asked_to_end(
    service: Service, served: ServedRun, listening: socket.socket, asked_to_end: asyncio.Semaphore
) -> None:
    with EngineThread(served.engine) as thread:  # pyright: ignore[reportArgumentType]
        service.open(served, failure=lambda: thread.error)
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(
            f"{served.name} at http://{shown}:{port}, OpenAI's interface at http://{shown}:{port}/v1",
            flush=True,
        )
        await asked_to_end.acquire()
        # A second signal waits no longer.
        draining = asyncio.create_task(service.drain(service.limits.drain_seconds))
        hurry = asyncio.create_task(asked_to_end.acquire())
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not draining.done():
            draining.cancel()
            await service.drain(0)


async def _loaded(load: Callable[[], ServedRun], asked_to_end: asyncio.Semaphore) -> ServedRun | None:
    """What is served; None if it is not wanted any more before it is there."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[ServedRun] = loop.create_future()

    def work() -> None:
        try:
            result, error = load(), None
        except BaseException as caught:  # also SystemExit: whatever it is, it is the main thread's
            result, error = None, caught
        with contextlib.suppress(RuntimeError):  # the loop is gone: nobody wants it
            loop.call_soon_threadsafe(_settle, loaded, result, error)

    # A daemon, for it cannot be interrupted and must not keep a process that was told to end.
    threading.Thread(target=work, name="loading", daemon=True).start()
    ended = asyncio.create_task(asked_to_end.acquire())
    await asyncio.wait({loaded, ended}, return_when=asyncio.FIRST_COMPLETED)
    if not loaded.done():
        return None
    ended.cancel()
    return loaded.result()


def _settle(loaded: asyncio.Future, result: ServedRun | None, error: BaseException | None) -> None:
    if error is None:
        loaded.set_result(result)
    else:
        loaded.set_exception(error)


def _signals() -> asyncio.Semaphore:
    """Counts requests to end."""
    asked_to_end = asyncio.Semaphore(0)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_end.release)
    return asked_to_end


def _uvicorn_config(application: object, limits: ServingLimits) -> uvicorn.Config:
    # Half of the files that this process may open: others are the run's, and a crowd must not take them.
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return uvicorn.Config(
        application,  # pyright: ignore[reportArgumentType]
        http=type("LimitedConnection", (Connection,), {"limits": limits}),
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        limit_concurrency=min(MOST_CONNECTIONS, most_files // 2),
        timeout_keep_alive=int(limits.idle_seconds),
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )

"""`zaya aegis metrics`: metrics of runs for Prometheus, over HTTP or in a file."""

import collections
import pathlib
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server, write_to_textfile
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from zaya_jax.aegis.views.prometheus_samples import METRICS, MetricSample, WatchedRun
from zaya_jax.errors import UserError
from zaya_jax.options import Parser
from zaya_jax.platform.host_header import LOOPBACK, is_address, is_allowed, parse_host

PORT = 9464
"""Default port, the same as that of OpenTelemetry's Prometheus exporters."""


def main(argv: Sequence[str]) -> None:
    """Serves metrics until the process is stopped, or writes them to a file.

    Raises:
      UserError: for a run that is listed twice, or a port that is not available.
    """
    parser = Parser(
        "aegis metrics",
        "Export metrics of runs to Prometheus: over HTTP, or in a file for node_exporter.",
        (
            "zaya aegis metrics runs/tiny",
            "zaya aegis metrics runs/tiny --textfile=/var/lib/node_exporter/zaya.prom",
        ),
    )
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--port", default=PORT, help="port to listen on; 0 for any free port")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all interfaces"
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name to accept in requests, such as that of a Kubernetes service; may be repeated",
    )
    parser.add_argument(
        "--textfile", type=pathlib.Path, metavar="PATH", help="write the metrics to this file once, and exit"
    )
    options = parser.parse_args(argv)
    registry = make_registry(options.runs)
    if options.textfile is not None:
        # prometheus_client renames a complete file, so that node_exporter never reads a part of one.
        write_to_textfile(str(options.textfile), registry)
    else:
        _wait_for_signal(
            lambda: serve(registry, options.host, options.port, allowed_hosts=options.allow_host)
        )


def _wait_for_signal(start: Callable[[], object]) -> None:
    """Calls a function, then waits until the handler of a signal raises an exception.

    Not `join` of a thread, nor `sigwait`: the kernel may deliver a signal to a thread of a library just
    before either of them begins to wait, and the interpreter, which runs handlers in the main thread, would
    not get there. But it writes to a socket first, in whichever thread, and reading that ends.
    """
    reading, writing = socket.socketpair()
    with reading, writing:
        writing.setblocking(False)  # the interpreter writes to it within the signal
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        try:
            start()
            while True:
                reading.recv(1)
        finally:
            signal.set_wakeup_fd(before)


def make_registry(runs: Sequence[pathlib.Path]) -> CollectorRegistry:
    """Returns a registry with the metrics of runs.

    Raises:
      UserError: for a run that is listed twice: a metric must not have two values with the same labels.
    """
    names = [str(run) for run in runs]
    for name in names:
        # The names become a label: two runs of one name would give samples with equal labels, which
        # Prometheus rejects.
        if names.count(name) > 1:
            raise UserError(f"{name} is listed {names.count(name)} times; list each run once")
    registry = CollectorRegistry()
    registry.register(RunCollector({str(run): WatchedRun(run) for run in runs}))
    return registry


def serve(
    registry: CollectorRegistry, host: str, port: int, *, allowed_hosts: Collection[str] = ()
) -> threading.Thread:
    """Starts to serve metrics in a thread, and prints the address.

    Args:
      registry: metrics to serve.
      host: address to listen on.
      port: port to listen on; 0 for any.
      allowed_hosts: names that requests may have in their Host header, in addition to those of this machine.

    Raises:
      UserError: for a port that is not available, or an invalid host name.
    """
    if not 0 <= port < 2**16:
        raise UserError(f"--port is {port}; it must be 0 to {2**16 - 1}")
    for name in allowed_hosts:
        if parse_host(name) != name.lower():
            raise UserError(
                f"--allow-host is {name}; it must be a name without a port, such as node1.cluster"
            )
    try:
        # Without metrics until the guard is in place.
        server, thread = start_http_server(port, host, CollectorRegistry())
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --port"
        ) from error
    server.set_app(_guarded(make_wsgi_app(registry), host, {name.lower() for name in allowed_hosts}))
    # An IPv6 address stands in brackets in a URL, because of its colons.
    shown = f"[{host}]" if ":" in host else host
    print(f"metrics at http://{shown}:{server.server_port}/metrics", flush=True)
    return thread


def _guarded(app: Callable, host: str, allowed: Collection[str]) -> Callable:
    """Wraps a WSGI application to reject Host headers of other sites, against DNS rebinding.

    If it listens on more than the loopback interface, IP addresses and this machine's names are allowed as
    well.
    """
    is_local = host in LOOPBACK
    # Host names are compared in lower case.
    names = {host.lower(), *allowed} | (
        set() if is_local else {socket.gethostname().lower(), socket.getfqdn()}
    )

    def guarded(environ: dict[str, Any], start_response: Callable) -> Iterable[bytes]:
        header = environ.get("HTTP_HOST", "")
        if is_allowed(header, names) or (not is_local and is_address(parse_host(header) or "")):
            return app(environ, start_response)
        body = b"the Host header names another machine; allow a name of this one with --allow-host\n"
        start_response("403 Forbidden", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
        return [body]

    return guarded


class RunCollector(Collector):
    """Collector that reads the files of runs at each scrape.

    Args:
      runs: runs by the value of their label.
    """

    def __init__(self, runs: dict[str, WatchedRun]):
        self._runs = runs
        # Runs are read incrementally: concurrent scrapes would each see only some of the new lines.
        self._lock = threading.Lock()

    def describe(self) -> list[Metric]:
        """Returns no metrics: registration must not read files, which may not exist yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of all runs, grouped by name."""
        samples = collections.defaultdict[str, list[tuple[str, MetricSample]]](list)
        with self._lock:
            for run, watched in self._runs.items():
                for sample in watched.samples():
                    samples[sample.name].append((run, sample))
        for name in METRICS:
            if name in samples:
                yield _family(name, samples[name])


def _family(name: str, samples: Sequence[tuple[str, MetricSample]]) -> Metric:
    # prometheus_client appends "_total" to the names of counters itself if it is missing.
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    labels = METRICS[name].labels
    family = kind(name, METRICS[name].meaning, labels=["run", *labels])
    for run, sample in samples:
        # Values of labels go by their place, in the order of the names above.
        family.add_metric([run, *(sample.labels[label] for label in labels)], sample.value)
    return family

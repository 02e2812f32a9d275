"""The supervisor, with an engine that runs nothing."""

import contextlib
import http.server
import itertools
import json
import threading

import pytest

from zaya_jax.aegis.agent.log_rules import load_rules
from zaya_jax.aegis.agent.sightings import Sighting, read_sightings, write_sighting
from zaya_jax.aegis.supervisor.restart_policy import (
    DONE,
    RESTART,
    STOP,
    WAIT,
    RestartPolicy,
)
from zaya_jax.aegis.supervisor.supervisor import Supervisor, read_excluded_nodes
from zaya_jax.run_folder.events import read_events
from zaya_jax.run_folder.names import DECIDED


class Nodes:
    """Engine whose attempts end with given exit codes, on nodes that stay available."""

    def __init__(self, folder, codes, *, lines=(), on_run=lambda number: None):
        self.folder, self.codes, self.lines, self.on_run = folder, iter(codes), dict(lines), on_run
        self.ran, self.drained, self.signals, self.requeued = [], [], [], 0
        self.may_drain = True
        self.signalled = threading.Event()

    def nodes(self):
        return ["n1", "n2", "n3", "n4"]

    def run(self, nodes, on_line):
        self.ran.append(list(nodes))
        for host, line in self.lines.pop(len(self.ran), ()):
            on_line(host, line)
        self.on_run(len(self.ran))
        code = next(self.codes)
        if code == "until signaled":
            assert self.signalled.wait(30)
            return 75
        return code

    def send_signal(self, number):
        self.signals.append(number)
        self.signalled.set()

    def drain(self, node, reason):
        self.drained.append(node)
        return None if self.may_drain else "Access/permission denied"

    @contextlib.contextmanager
    def watching(self, nodes, run_folder):
        yield

    def requeue(self):
        self.requeued += 1


def supervise(engine, **values):
    output = []
    policy = RestartPolicy(nodes=3, min_nodes=3, max_attempts_without_progress=3, wait_seconds=0.01)
    folder = str(engine.folder)
    supervisor = Supervisor(engine, folder, load_rules(), policy, report=output.append, **values)
    return supervisor, output


def decisions(folder):
    return [event["action"] for event in read_events(folder) if event["event"] == DECIDED]


def test_a_run_is_restarted_until_it_is_complete(tmp_path):
    engine = Nodes(tmp_path, [137, 124, 1, 0])
    supervisor, output = supervise(engine)
    assert supervisor.run() == 0
    assert decisions(tmp_path) == [RESTART, RESTART, WAIT, DONE]
    assert engine.ran == [["n1", "n2", "n3"]] * 4
    assert engine.drained == []
    assert any("code 137: a process was killed" in line for line in output)


@pytest.mark.parametrize("may_drain", [True, False])
def test_a_node_with_a_fault_in_its_log_is_excluded_permanently(tmp_path, may_drain):
    """The next supervisor excludes it as well, also if only operators may drain nodes in SLURM."""
    line = ("n2", "amdgpu 0000:05:00.0: 1 uncorrectable hardware errors detected in umc block")
    engine = Nodes(tmp_path, [1, 0], lines={1: [line]})
    engine.may_drain = may_drain
    supervisor, output = supervise(engine)
    assert supervisor.run() == 0
    assert engine.ran == [["n1", "n2", "n3"], ["n1", "n3", "n4"]]
    assert engine.drained == ["n2"]
    assert (
        any("n2 is excluded from this run, but could not be drained" in each for each in output) != may_drain
    )
    assert read_excluded_nodes(str(tmp_path)) == {"n2"}
    later = Nodes(tmp_path, [0])
    supervise(later)[0].run()
    assert later.ran == [["n1", "n3", "n4"]]


def test_an_attempt_ends_with_a_save_when_a_node_is_about_to_fail(tmp_path):
    """An agent records it during the attempt; the processes are signaled once."""

    def see(number):
        if number == 1:
            later = Sighting(9e9, "n3", "ecc_correctable", "drain", "sensor", "100 in an hour")
            write_sighting(tmp_path, later)

    engine = Nodes(tmp_path, ["until signaled", 0], on_run=see)
    supervisor, _ = supervise(engine)
    assert supervisor.run() == 0
    assert len(engine.signals) == 1
    assert engine.ran[0] == ["n1", "n2", "n3"]
    assert "n3" not in engine.ran[1]


def test_a_requested_stop_saves_and_requeues(tmp_path):
    engine = Nodes(tmp_path, ["until signaled"])
    supervisor, _ = supervise(engine)
    engine.on_run = lambda number: supervisor.request_stop()
    assert supervisor.run() == 75
    assert engine.requeued == 1
    assert len(engine.ran) == 1


def test_a_dry_run_only_prints_the_decision(tmp_path, monkeypatch):
    monkeypatch.setenv("ZAYA_WEBHOOK", "http://127.0.0.1:9/never")
    line = ("n2", "1 uncorrectable hardware errors detected")
    engine = Nodes(tmp_path, [76], lines={1: [line]})
    supervisor, output = supervise(engine, dry_run=True)
    assert supervisor.run() == 76
    assert (engine.drained, engine.signals, read_excluded_nodes(str(tmp_path))) == ([], [], set())
    assert any(each.startswith("dry run, would leave out: without n2") for each in output)
    assert not any("no webhook was called" in each for each in output)
    assert [e["acted"] for e in read_events(tmp_path) if e["event"] == DECIDED] == [False]


@pytest.fixture
def webhook(monkeypatch):
    """Bodies that the webhook received."""
    bodies = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("ZAYA_WEBHOOK", f"http://127.0.0.1:{server.server_port}/secret")
    yield bodies
    server.shutdown()
    server.server_close()


def test_the_webhook_receives_the_decision(tmp_path, webhook):
    supervisor, _ = supervise(Nodes(tmp_path, [2]))
    assert supervisor.run() == 2
    (body,) = webhook
    assert body["text"].startswith(f"run {tmp_path}: stop: the run was rejected")
    assert body["action"] == STOP


def test_a_failed_webhook_is_reported_without_its_address(tmp_path, monkeypatch):
    monkeypatch.setenv("ZAYA_WEBHOOK", "http://127.0.0.1:1/secret")
    supervisor, output = supervise(Nodes(tmp_path, [2]))
    assert supervisor.run() == 2
    assert any("could not be called: URLError" in each for each in output)
    assert not any("secret" in each for each in output)


def test_sightings_round_trip(tmp_path):
    given = [Sighting(float(t), host, "c", "note", "s", "e") for t, host in itertools.product((1, 2), "ab")]
    for each in given:
        write_sighting(tmp_path, each)
    with (tmp_path / "sightings/a.jsonl").open("a") as file:
        file.write('{"time": 3, "host"')
    write_sighting(tmp_path, Sighting(4.0, "a", "c", "note", "s", "x" * 5000))
    found = read_sightings(tmp_path)
    assert found[:4] == given
    assert len(found[4].evidence) == 400
    assert [each.time for each in read_sightings(tmp_path, since=2.0)] == [2.0, 2.0, 4.0]
    assert read_sightings(tmp_path / "nowhere") == []

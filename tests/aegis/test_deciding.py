"""What a supervisor decides, and that it does what it decided, on an engine that runs nothing."""

import contextlib
import http.server
import itertools
import json
import threading

import pytest

from zaya_jax.aegis.deciding import (
    DONE,
    LEAVE_OUT,
    REQUEUE,
    RESTART,
    STOP,
    WAIT,
    Attempt,
    RestartPolicy,
    decide,
)
from zaya_jax.aegis.journal import DECIDED, read_events
from zaya_jax.aegis.rules import load_rules
from zaya_jax.aegis.sightings import Sighting, read_sightings, write_sighting
from zaya_jax.aegis.supervisor import Supervision, Supervisor, read_left_out

NODES = ("n1", "n2", "n3")
POLICY = RestartPolicy(nodes=3, least_nodes=3, most_idle=3, wait_seconds=8.0)


def attempt(code=1, *, progress=True, **values):
    return Attempt(code, progress, NODES, **values)


def seen(action, host="n2", name="some_class"):
    return Sighting(1.0, host, name, action, "dmesg", "a line")


@pytest.mark.parametrize(
    ("attempts", "action"),
    [
        ([attempt(0)], DONE),
        ([attempt(2)], STOP),
        ([attempt(65)], STOP),
        ([attempt(130)], STOP),
        ([attempt(75, was_asked=True)], REQUEUE),
        ([attempt(0, was_asked=True)], DONE),
        ([attempt(75)], RESTART),
        ([attempt(137)], RESTART),
        ([attempt(76, wrong=("n3",))], LEAVE_OUT),
        ([attempt(76)], RESTART),
        ([attempt(124, late=("n1",))], RESTART),
        ([attempt(124, late=("n1",)), attempt(124, late=("n1",))], LEAVE_OUT),
        ([attempt(124, late=("n1",)), attempt(124, late=("n2",))], RESTART),
        ([attempt(124, late=("n1",)), attempt(137), attempt(124, late=("n1",))], RESTART),
        ([attempt(sightings=(seen("drain"),))], LEAVE_OUT),
        ([attempt(sightings=(seen("wait"),))], WAIT),
        ([attempt(sightings=(seen("note"), seen("restart")))], RESTART),
        ([attempt(sightings=(seen("page"),))], RESTART),
        ([attempt(progress=False, sightings=(seen("page"),))] * 2, WAIT),
        ([attempt(progress=False)], RESTART),
        ([attempt(progress=False)] * 2, WAIT),
        ([attempt(progress=False)] * 3, STOP),
        ([attempt(progress=False)] * 2 + [attempt()] + [attempt(progress=False)], RESTART),
    ],
)
def test_what_is_decided(attempts, action):
    assert decide(attempts, ("n1", "n2", "n3", "n4"), POLICY).action == action


def test_a_human_is_called_for_what_a_human_must_do():
    usable = (*NODES, "n4")
    assert not decide([attempt(137)], usable, POLICY).page
    for last in (attempt(2), attempt(76, wrong=("n1",)), attempt(sightings=(seen("page"),))):
        assert decide([last], usable, POLICY).page
    assert decide([attempt(progress=False)] * 3, usable, POLICY).page


def test_nodes_are_left_out_as_long_as_enough_are_left():
    last = attempt(76, wrong=("n3",), sightings=(seen("drain"),))
    found = decide([last], (*NODES, "n4", "n5"), POLICY)
    assert (found.action, set(found.nodes)) == (LEAVE_OUT, {"n2", "n3"})
    assert any("a line" in each for each in found.evidence)
    assert any("devices of n3" in each for each in found.evidence)
    found = decide([last], (*NODES, "n4"), POLICY)
    assert found.action == RESTART
    assert found.page
    assert "should be left out" in found.reason
    assert decide([last], NODES, RestartPolicy(nodes=3, least_nodes=1)).action == LEAVE_OUT


def test_what_is_seen_of_others_nodes_is_no_matter_of_this_run():
    assert decide([attempt(sightings=(seen("drain", host="n9"),))], NODES, POLICY).action == RESTART


def test_each_try_in_vain_waits_longer_and_its_cost_is_told():
    policy = RestartPolicy(nodes=3, least_nodes=3, most_idle=9, wait_seconds=8.0)
    flaps = [attempt(progress=False, sightings=(seen("wait"),), lost_seconds=5.0)] * 4
    found = [decide(flaps[:n], NODES, policy) for n in (1, 2, 3, 4)]
    assert [each.wait_seconds for each in found] == [8.0, 16.0, 32.0, 64.0]
    assert [each.cost_seconds for each in found] == [13.0, 21.0, 37.0, 69.0]


class Nodes:
    """An engine whose attempts end with codes that were given, on nodes that stay."""

    def __init__(self, folder, codes, *, lines=(), on_run=lambda number: None):
        self.folder, self.codes, self.lines, self.on_run = folder, iter(codes), dict(lines), on_run
        self.ran, self.drained, self.told, self.requeued = [], [], [], 0
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
        if code == "until told":
            assert self.signalled.wait(30)
            return 75
        return code

    def tell(self, number):
        self.told.append(number)
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
    said = []
    policy = RestartPolicy(nodes=3, least_nodes=3, most_idle=3, wait_seconds=0.01)
    given = Supervision(str(engine.folder), load_rules(), policy, **values)
    supervisor = Supervisor(engine, given, say=said.append)
    return supervisor, said


def decisions(folder):
    return [event["action"] for event in read_events(folder) if event["event"] == DECIDED]


def test_a_run_is_kept_going_to_its_end(tmp_path):
    engine = Nodes(tmp_path, [137, 124, 1, 0])
    supervisor, said = supervise(engine)
    assert supervisor.keep_going() == 0
    assert decisions(tmp_path) == [RESTART, RESTART, WAIT, DONE]
    assert engine.ran == [["n1", "n2", "n3"]] * 4
    assert engine.drained == []
    assert any("code 137: a process was killed" in line for line in said)


@pytest.mark.parametrize("may_drain", [True, False])
def test_a_node_whose_log_says_that_it_fails_is_left_out_for_good(tmp_path, may_drain):
    """Also by the next supervisor, and where SLURM lets only operators drain."""
    line = ("n2", "amdgpu 0000:05:00.0: 1 uncorrectable hardware errors detected in umc block")
    engine = Nodes(tmp_path, [1, 0], lines={1: [line]})
    engine.may_drain = may_drain
    supervisor, said = supervise(engine)
    assert supervisor.keep_going() == 0
    assert engine.ran == [["n1", "n2", "n3"], ["n1", "n3", "n4"]]
    assert engine.drained == ["n2"]
    assert any("n2 is left out here, and not drained" in each for each in said) != may_drain
    assert read_left_out(str(tmp_path)) == {"n2"}
    later = Nodes(tmp_path, [0])
    supervise(later)[0].keep_going()
    assert later.ran == [["n1", "n3", "n4"]]


def test_a_node_that_will_fail_is_left_while_the_run_can_save(tmp_path):
    """An agent sees it while the run goes on; the processes are told once."""

    def see(number):
        if number == 1:
            later = Sighting(9e9, "n3", "ecc_correctable", "drain", "sensor", "100 in an hour")
            write_sighting(tmp_path, later)

    engine = Nodes(tmp_path, ["until told", 0], on_run=see)
    supervisor, _ = supervise(engine)
    assert supervisor.keep_going() == 0
    assert len(engine.told) == 1
    assert engine.ran[0] == ["n1", "n2", "n3"]
    assert "n3" not in engine.ran[1]


def test_whoever_is_asked_has_the_run_save_and_begins_none(tmp_path):
    engine = Nodes(tmp_path, ["until told"])
    supervisor, _ = supervise(engine)
    engine.on_run = lambda number: supervisor.ask_to_stop()
    assert supervisor.keep_going() == 75
    assert engine.requeued == 1
    assert len(engine.ran) == 1


def test_a_dry_run_tells_and_does_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("ZAYA_WEBHOOK", "http://127.0.0.1:9/never")
    line = ("n2", "1 uncorrectable hardware errors detected")
    engine = Nodes(tmp_path, [76], lines={1: [line]})
    supervisor, said = supervise(engine, dry_run=True)
    assert supervisor.keep_going() == 76
    assert (engine.drained, engine.told, read_left_out(str(tmp_path))) == ([], [], set())
    assert any(each.startswith("dry run, would leave out: without n2") for each in said)
    assert not any("nobody was called" in each for each in said)
    assert [e["acted"] for e in read_events(tmp_path) if e["event"] == DECIDED] == [False]


@pytest.fixture
def webhook(monkeypatch):
    """What it was sent."""
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


def test_a_human_is_called_by_webhook(tmp_path, webhook):
    supervisor, _ = supervise(Nodes(tmp_path, [2]))
    assert supervisor.keep_going() == 2
    (body,) = webhook
    assert body["text"].startswith(f"run {tmp_path}: stop: the run was refused")
    assert body["action"] == STOP


def test_whom_nobody_answers_goes_on_and_keeps_the_address(tmp_path, monkeypatch):
    monkeypatch.setenv("ZAYA_WEBHOOK", "http://127.0.0.1:1/secret")
    supervisor, said = supervise(Nodes(tmp_path, [2]))
    assert supervisor.keep_going() == 2
    assert any("could not be called: URLError" in each for each in said)
    assert not any("secret" in each for each in said)


def test_sightings_are_read_as_they_were_written(tmp_path):
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

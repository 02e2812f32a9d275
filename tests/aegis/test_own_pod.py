"""An agent that acts by itself in a pod: what it asks of Kubernetes, writes, and leaves alone."""

import http.server
import json
import threading

import kubernetes
import pytest

from zaya_jax.aegis import agent, own_pod
from zaya_jax.aegis.agent import Agent
from zaya_jax.aegis.journal import events_of
from zaya_jax.aegis.own_pod import OnOwn, OwnPod, cordon_and_leave
from zaya_jax.aegis.rules import load_rules
from zaya_jax.aegis.sightings import Sighting

POD = OwnPod("zaya-node-0-3-x7", "training", "mi300x-17")
ENVIRONMENT = {"POD_NAME": POD.name, "POD_NAMESPACE": POD.namespace, "NODE_NAME": POD.node}


def sighting(action, name="ecc_uncorrectable", evidence="2 uncorrectable errors"):
    return Sighting(1.0, POD.node, name, action, "kernel", evidence)


@pytest.fixture
def server(monkeypatch):
    """Kubernetes' interface, as far as it is asked: keeps the requests, and answers with `code`."""

    class Asked(http.server.BaseHTTPRequestHandler):
        def _answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.server.requests.append((self.command, self.path, json.loads(body or "{}")))
            self.send_response(self.server.code)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"kind": "Status", "apiVersion": "v1", "metadata": {}}')

        do_PATCH = do_DELETE = _answer

        def log_message(self, *_):
            pass

    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Asked)
    served.requests, served.code = [], 200
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    here = kubernetes.client.Configuration(host=f"http://127.0.0.1:{served.server_port}")
    # Where it is and who asks, a pod's files say; the rest is the client's own way.
    monkeypatch.setattr(
        kubernetes.config, "load_incluster_config", lambda: kubernetes.client.Configuration.set_default(here)
    )
    yield served
    served.shutdown()
    thread.join()
    served.server_close()
    kubernetes.client.Configuration.set_default(None)


def test_a_node_is_cordoned_before_its_pod_is_deleted(server):
    assert cordon_and_leave(POD, "2 uncorrectable errors") is None
    (patch, node, cordoned), (delete, pod, _) = server.requests
    assert (patch, node) == ("PATCH", f"/api/v1/nodes/{POD.node}")
    assert cordoned["spec"] == {"unschedulable": True}
    assert cordoned["metadata"]["annotations"] == {"zaya-jax/cordoned": "2 uncorrectable errors"}
    assert (delete, pod) == ("DELETE", f"/api/v1/namespaces/{POD.namespace}/pods/{POD.name}")


def test_a_pod_stays_where_the_node_may_not_be_cordoned(server):
    server.code = 403
    assert cordon_and_leave(POD, "") == "Kubernetes refuses it: 403 Forbidden"
    assert len(server.requests) == 1


def test_outside_of_kubernetes_nothing_is_asked(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert "Kubernetes cannot be asked" in str(cordon_and_leave(POD, ""))


def test_hardware_that_fails_is_left_once_and_told(tmp_path):
    left, said = [], []
    on_own = OnOwn(POD, tmp_path, leave=lambda *given: left.append(given), say=said.append)
    for action in ("note", "wait", "restart", "drain", "drain"):
        on_own(sighting(action))
    what = f"{POD.node}: ecc_uncorrectable: 2 uncorrectable errors"
    assert left == [(POD, what)]
    (event,) = events_of(tmp_path)
    assert (event["event"], event["action"], event["nodes"]) == ("decided", "leave out", [POD.node])
    assert (event["evidence"], event["acted"], event["cost_seconds"]) == ([what], True, 0.0)
    assert said == ["agent: nobody was called: ZAYA_WEBHOOK is not set"]


def test_a_human_is_called_for_what_only_one_can_mend(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(own_pod, "page", lambda text, about: called.append(text))
    OnOwn(POD, tmp_path, leave=lambda *_: None)(sighting("page", "disk_full", "no space"))
    assert called == [f"run {tmp_path}: {POD.node}: disk_full: no space"]
    assert events_of(tmp_path) == []


def test_a_dry_run_only_tells(tmp_path):
    said = []
    on_own = OnOwn(POD, tmp_path, dry_run=True, leave=lambda *_: pytest.fail("it acted"), say=said.append)
    on_own(sighting("drain"))
    on_own(sighting("page"))
    (line,) = said
    assert line.startswith(f"agent: dry run, would cordon {POD.node} and leave it: ")
    assert events_of(tmp_path)[0]["acted"] is False


def test_an_agent_hands_on_what_it_sees(tmp_path):
    acted, log = [], tmp_path / "log"
    log.write_text("")
    watching = Agent(
        tmp_path, load_rules(), logs=[str(log)], root=tmp_path, kernel_log=tmp_path / "none",
        act=acted.append, say=lambda _: None,
    )  # fmt: skip
    log.write_text("amdgpu: 1 uncorrectable errors detected\nall is well\n")
    watching.look()
    assert [(each.name, each.action) for each in acted] == [("ecc_uncorrectable", "drain")]


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        (["--kubernetes"], {}, "POD_NAME is not set"),
        (["--kubernetes"], {"POD_NAME": "a", "POD_NAMESPACE": "b"}, "NODE_NAME is not set"),
        (["--dry-run"], ENVIRONMENT, "--dry-run is of no use without --kubernetes"),
    ],
)
def test_bad_words_get_a_sentence(tmp_path, monkeypatch, words, environment, sentence):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=sentence):
        agent.main([str(tmp_path), *words])

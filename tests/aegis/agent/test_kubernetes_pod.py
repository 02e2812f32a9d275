"""Actions of an agent in a Kubernetes pod: its requests, events, and limits."""

import http.server
import json
import threading

import kubernetes
import pytest

from zaya_jax.aegis.agent import agent, kubernetes_pod
from zaya_jax.aegis.agent.agent import Agent
from zaya_jax.aegis.agent.kubernetes_pod import Pod, PodActor, cordon_and_leave
from zaya_jax.aegis.agent.log_rules import load_rules
from zaya_jax.aegis.agent.sightings import Sighting
from zaya_jax.run_folder.events import events_of

POD = Pod("zaya-node-0-3-x7", "training", "mi300x-17")
ENVIRONMENT = {"POD_NAME": POD.name, "POD_NAMESPACE": POD.namespace, "NODE_NAME": POD.node}


def sighting(action, name="ecc_uncorrectable", evidence="2 uncorrectable errors"):
    return Sighting(1.0, POD.node, name, action, "kernel", evidence)


@pytest.fixture
def server(monkeypatch):
    """Fake of the Kubernetes API that stores the requests, and responds with the status `code`."""

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
    # In a pod, mounted files have the address and the account; everything else is the real client.
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


def test_the_pod_is_kept_if_the_node_cannot_be_cordoned(server):
    server.code = 403
    assert cordon_and_leave(POD, "") == "Kubernetes rejects the request: 403 Forbidden"
    assert len(server.requests) == 1


def test_outside_of_kubernetes_the_failure_is_returned(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert "Kubernetes cannot be reached" in str(cordon_and_leave(POD, ""))


def test_a_failing_node_is_left_once_and_recorded(tmp_path):
    left, output = [], []
    on_own = PodActor(POD, tmp_path, leave=lambda *given: left.append(given), report=output.append)
    for action in ("note", "wait", "restart", "drain", "drain"):
        on_own(sighting(action))
    what = f"{POD.node}: ecc_uncorrectable: 2 uncorrectable errors"
    assert left == [(POD, what)]
    (event,) = events_of(tmp_path)
    assert (event["event"], event["action"], event["nodes"]) == ("decided", "leave out", [POD.node])
    assert (event["evidence"], event["acted"], event["cost_seconds"]) == ([what], True, 0.0)
    assert output == ["agent: no webhook was called: ZAYA_WEBHOOK is not set"]


def test_sightings_with_the_action_page_notify_a_human(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(kubernetes_pod, "page", lambda text, about: called.append(text))
    PodActor(POD, tmp_path, leave=lambda *_: None)(sighting("page", "disk_full", "no space"))
    assert called == [f"run {tmp_path}: {POD.node}: disk_full: no space"]
    assert events_of(tmp_path) == []


def test_a_dry_run_only_reports(tmp_path):
    output = []
    on_own = PodActor(
        POD, tmp_path, dry_run=True, leave=lambda *_: pytest.fail("it acted"), report=output.append
    )
    on_own(sighting("drain"))
    on_own(sighting("page"))
    (line,) = output
    assert line.startswith(f"agent: dry run, would cordon {POD.node} and leave it: ")
    assert events_of(tmp_path)[0]["acted"] is False


def test_an_agent_passes_sightings_to_its_callback(tmp_path):
    acted, log = [], tmp_path / "log"
    log.write_text("")
    watching = Agent(
        tmp_path, load_rules(), logs=[str(log)], root=tmp_path, kernel_log=tmp_path / "none",
        on_sighting=acted.append, report=lambda _: None,
    )  # fmt: skip
    log.write_text("amdgpu: 1 uncorrectable errors detected\nall is well\n")
    watching.sample()
    assert [(each.name, each.action) for each in acted] == [("ecc_uncorrectable", "drain")]


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        (["--kubernetes"], {}, "POD_NAME is not set"),
        (["--kubernetes"], {"POD_NAME": "a", "POD_NAMESPACE": "b"}, "NODE_NAME is not set"),
        (["--dry-run"], ENVIRONMENT, "--dry-run has no effect without --kubernetes"),
    ],
)
def test_invalid_options_and_environments(tmp_path, monkeypatch, words, environment, sentence):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=sentence):
        agent.main([str(tmp_path), *words])

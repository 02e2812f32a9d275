"""Actions of an agent under Kubernetes, where a JobSet restarts runs and there is no supervisor.

The agent acts only on its own node and its own pod.
"""

import dataclasses
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Mapping

from zaya_jax.aegis.agent.sightings import Sighting
from zaya_jax.aegis.supervisor.restart_policy import EXCLUDE, Decision
from zaya_jax.aegis.supervisor.webhook import page
from zaya_jax.aegis.views.goodput import redo_seconds
from zaya_jax.checkpoint import all_steps
from zaya_jax.errors import UserError
from zaya_jax.platform.shell import install_command
from zaya_jax.run_folder.events import events_of, write_event
from zaya_jax.run_folder.names import DECIDED

# Annotation of a node with the reason why it was cordoned, for its operator.
_ANNOTATION = "zaya-jax/cordoned"
LIMIT_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Pod:
    """A Kubernetes pod.

    Attributes:
      name: name of the pod.
      namespace: namespace of the pod.
      node: name of the node that the pod runs on.
    """

    name: str
    namespace: str
    node: str


def find_pod(environ: Mapping[str, str]) -> Pod:
    """Returns the pod of this process, from variables that its manifest sets.

    Raises:
      UserError: if a variable or the package `kubernetes` is missing.
    """
    names = "POD_NAME", "POD_NAMESPACE", "NODE_NAME"
    if missing := [name for name in names if not environ.get(name)]:
        raise UserError(
            f"{missing[0]} is not set; a pod's manifest must set it, as configs/cluster/jobset.yaml does"
        )
    if importlib.util.find_spec("kubernetes") is None:
        raise UserError(f"the package kubernetes is not installed: {install_command('kubernetes')}")
    return Pod(*(environ[name] for name in names))


class PodActor:
    """Acts on sightings of its own node: leaves it for the action "drain", and notifies a human for "page".

    Args:
      pod: pod of this process.
      run_folder: folder of the run, whose events record the decisions.
      dry_run: whether to only print what would be done.
      leave: cordons the node and deletes the pod for a reason; returns why this failed, or None.
      report: prints a line.
    """

    def __init__(
        self,
        pod: Pod,
        run_folder: pathlib.Path,
        *,
        dry_run: bool = False,
        leave: Callable[[Pod, str], str | None] | None = None,
        report: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ):
        self._pod, self._run_folder, self._dry_run, self._report = pod, run_folder, dry_run, report
        self._leave = leave or cordon_and_leave
        self._is_leaving = False

    def __call__(self, sighting: Sighting) -> None:
        """Takes the action of a sighting. A node is left once: the next pod has its own agent."""
        evidence = f"{sighting.host}: {sighting.name}: {sighting.evidence}"
        if sighting.action == "drain" and not self._is_leaving:
            self._is_leaving = True
            self._leave_node(evidence)
        elif sighting.action == "page":
            self._page(evidence, {"seen": sighting.name})

    def _leave_node(self, evidence: str) -> None:
        node = self._pod.node
        newest = max(all_steps(str(self._run_folder)), default=0)
        cost = redo_seconds(events_of(self._run_folder), newest)
        decision = Decision(EXCLUDE, f"without {node}", (evidence,), (node,), page=True, cost_seconds=cost)
        values = dataclasses.asdict(decision) | {"acted": not self._dry_run}
        # Recorded first, because this process ends with its pod.
        write_event(self._run_folder, DECIDED, **values)
        if self._dry_run:
            self._report(f"agent: dry run, would cordon {node} and leave it: {evidence}")
            return
        self._page(f"{decision.action}: {decision.reason}: {evidence}", values)
        failure = self._leave(self._pod, evidence)
        if failure is not None:
            self._report(f"agent: cannot leave {node}: {failure}")

    def _page(self, text: str, values: Mapping[str, object]) -> None:
        failure = None if self._dry_run else page(f"run {self._run_folder}: {text}", values)
        if failure is not None:
            self._report(f"agent: no webhook was called: {failure}")


def cordon_and_leave(pod: Pod, reason: str) -> str | None:
    """Cordons a node and deletes a pod on it.

    The process in the pod then saves and exits, which fails its job, and the JobSet restarts all jobs on
    other nodes.

    Args:
      pod: pod to delete, with its node.
      reason: annotation for the operator of the node.

    Returns:
      Why this failed; None if it succeeded.
    """
    # Imported here, because it takes half a second and 60 MB, which most agents never need.
    import kubernetes
    import urllib3

    cordoned = {"spec": {"unschedulable": True}, "metadata": {"annotations": {_ANNOTATION: reason[:400]}}}
    try:
        # With the credentials of the service account of this pod.
        kubernetes.config.load_incluster_config()
        core = kubernetes.client.CoreV1Api()
        # In this order: a pod that is deleted first could be scheduled on the same node again.
        core.patch_node(pod.node, cordoned, _request_timeout=LIMIT_SECONDS)
        core.delete_namespaced_pod(pod.name, pod.namespace, _request_timeout=LIMIT_SECONDS)
    except kubernetes.client.ApiException as error:
        return f"Kubernetes rejects the request: {error.status} {error.reason}"
    except (kubernetes.config.ConfigException, urllib3.exceptions.HTTPError) as error:
        return f"Kubernetes cannot be reached: {error}"
    return None

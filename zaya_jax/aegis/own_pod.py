"""What an agent does by itself under Kubernetes, where a JobSet begins runs anew and nobody supervises.

Only about the node that it stands on, and the pod that it belongs to: nobody else's are touched.
"""

import dataclasses
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Mapping

from zaya_jax.aegis.deciding import LEAVE_OUT, Decision
from zaya_jax.aegis.goodput import find_attempts, redo_seconds
from zaya_jax.aegis.journal import DECIDED, events_of, write_event
from zaya_jax.aegis.paging import page
from zaya_jax.aegis.sightings import Sighting
from zaya_jax.checkpoint import all_steps

_ANNOTATION = "zaya-jax/cordoned"
"""Tells an operator why a node was cordoned."""
LIMIT_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class OwnPod:
    """A pod, as it knows itself.

    Attributes:
      name: of the pod.
      namespace: that it is in.
      node: that it runs on.
    """

    name: str
    namespace: str
    node: str


def own_pod(environ: Mapping[str, str]) -> OwnPod:
    """The pod that this process runs in, by what its manifest says.

    Raises:
      ValueError: where a variable or the package for Kubernetes is missing.
    """
    names = "POD_NAME", "POD_NAMESPACE", "NODE_NAME"
    if missing := [name for name in names if not environ.get(name)]:
        raise ValueError(
            f"{missing[0]} is not set; a pod's manifest must set it, as configs/cluster/jobset.yaml does"
        )
    if importlib.util.find_spec("kubernetes") is None:
        raise ValueError(
            "the package kubernetes is not installed; it must be: pip install 'zaya_jax[kubernetes]'"
        )
    return OwnPod(*(environ[name] for name in names))


class OnOwn:
    """Acts by sightings of a pod's own node: leaves it at what drains, calls a human at what pages.

    Args:
      pod: that this is.
      run_folder: whose events tell what was decided.
      dry_run: whether it only tells what it would do.
      leave: does it; returns why it could not.
      say: prints a line.
    """

    def __init__(
        self,
        pod: OwnPod,
        run_folder: pathlib.Path,
        *,
        dry_run: bool = False,
        leave: Callable[[OwnPod, str], str | None] | None = None,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ):
        self._pod, self._run_folder, self._dry_run, self._say = pod, run_folder, dry_run, say
        self._leave = leave or cordon_and_leave
        self._is_leaving = False

    def __call__(self, sighting: Sighting) -> None:
        """Does what a sighting asks for. A node is left once: the next pod has an agent of its own."""
        what = f"{sighting.host}: {sighting.name}: {sighting.evidence}"
        if sighting.action == "drain" and not self._is_leaving:
            self._is_leaving = True
            self._decide(what)
        elif sighting.action == "page":
            self._call(what, {"seen": sighting.name})

    def _decide(self, what: str) -> None:
        node = self._pod.node
        decision = Decision(
            LEAVE_OUT, f"without {node}", (what,), (node,), page=True, cost_seconds=self._cost()
        )
        about = dataclasses.asdict(decision) | {"acted": not self._dry_run}
        write_event(self._run_folder, DECIDED, **about)
        if self._dry_run:
            self._say(f"agent: dry run, would cordon {node} and leave it: {what}")
            return
        self._call(f"{decision.action}: {decision.reason}: {what}", about)
        failure = self._leave(self._pod, what)
        if failure is not None:
            self._say(f"agent: {node} was not left: {failure}")

    def _cost(self) -> float:
        """Seconds of the run that are to be made again, if it does not save before it ends."""
        lives = find_attempts(events_of(self._run_folder))
        newest = max(all_steps(str(self._run_folder)), default=0)
        return redo_seconds(lives[-1], newest) if lives else 0.0

    def _call(self, text: str, about: Mapping[str, object]) -> None:
        failure = None if self._dry_run else page(f"run {self._run_folder}: {text}", about)
        if failure is not None:
            self._say(f"agent: nobody was called: {failure}")


def cordon_and_leave(pod: OwnPod, reason: str) -> str | None:
    """Has Kubernetes put no pod on a node any more, and delete this one.

    Its process then saves and ends, its job fails by that, and the JobSet begins all anew on other nodes.

    Args:
      pod: this one.
      reason: is kept with the node, for its operator.

    Returns:
      Why that could not be done; None where it was.
    """
    # Half a second and 60 MB, which an agent has no use for before.
    import kubernetes
    import urllib3

    cordoned = {"spec": {"unschedulable": True}, "metadata": {"annotations": {_ANNOTATION: reason[:400]}}}
    try:
        kubernetes.config.load_incluster_config()
        core = kubernetes.client.CoreV1Api()
        core.patch_node(pod.node, cordoned, _request_timeout=LIMIT_SECONDS)
        core.delete_namespaced_pod(pod.name, pod.namespace, _request_timeout=LIMIT_SECONDS)
    except kubernetes.client.ApiException as error:
        return f"Kubernetes refuses it: {error.status} {error.reason}"
    except (kubernetes.config.ConfigException, urllib3.exceptions.HTTPError) as error:
        return f"Kubernetes cannot be asked: {error}"
    return None

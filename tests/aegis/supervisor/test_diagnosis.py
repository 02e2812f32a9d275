"""Causes of the ends of attempts: the most specific trace counts, with the hosts that it names."""

import pytest

from zaya_jax.aegis.agent.sightings import Sighting
from zaya_jax.aegis.supervisor.diagnosis import Diagnosis, diagnose
from zaya_jax.run_folder.names import CORRUPTED, DIVERGED, STALLED, STOPPED

NODES = ("n0", "n1", "n2", "n3")


def seen(name, host, evidence="a line"):
    return Sighting(1.0, host, name, "restart", "standard error", evidence)


def corrupted(tensor, *hosts):
    return {"event": CORRUPTED, "findings": [{"tensor": tensor}], "hosts": list(hosts)}


LOST = [seen("network_peer_lost", host) for host in NODES]
CUT_OFF = [
    seen("coordinator_lost", host, f"zaya: process {n} on {host} does not reach process 0; run again")
    for n, host in enumerate(NODES)
]
STALL = {"event": STALLED, "hosts": ["n2"]}
KILLED = seen("crashed", "n2", "launch: error: n2: process 2: Killed")


@pytest.mark.parametrize(
    ("events", "sightings", "expected"),
    [
        ([], [], Diagnosis()),
        ([], LOST, Diagnosis()),
        ([], [*LOST, CUT_OFF[3]], Diagnosis("network", ("n3",))),
        # Process 0 has received a damaged message of another one.
        (
            [],
            [seen("coordinator_lost", "n0", "process 2 on n2 exchanges damaged messages with process 0")],
            Diagnosis("network", ("n2",)),
        ),
        ([], [*CUT_OFF, KILLED], Diagnosis("killed", ("n2",))),
        ([], [*LOST, KILLED], Diagnosis("killed", ("n2",))),
        (
            [],
            [KILLED, seen("crashed", "n1", "srun: error: n1: task 1: Segmentation fault")],
            Diagnosis("killed", ("n1", "n2")),
        ),
        ([], [seen("crashed", "n9", "x: Killed")], Diagnosis("killed")),
        ([], [*LOST, seen("program_error", "n3")], Diagnosis("error", ("n3",))),
        (
            [],
            [seen("program_error", "n3"), seen("host_out_of_memory", "n1")],
            Diagnosis("out of memory", ("n1",)),
        ),
        ([STALL], [], Diagnosis("stall", ("n2",))),
        # The others of a hanging process report a lost peer; a process that is cut off does so itself.
        ([STALL], [*LOST, *CUT_OFF[:2]], Diagnosis("stall", ("n2",))),
        ([STALL], [CUT_OFF[2]], Diagnosis("network", ("n2",))),
        ([{"event": STALLED, "hosts": []}], LOST, Diagnosis("stall")),
        ([{"event": STOPPED}], [], Diagnosis("stop signal")),
        ([{"event": DIVERGED, "hosts": ["n1"]}], LOST, Diagnosis("divergence", ("n1",))),
        (
            [corrupted("optimizer/0/mu/x", "n1", "n3"), {"event": DIVERGED, "hosts": ["n1"]}],
            [],
            Diagnosis("corrupted moments", ("n1", "n3")),
        ),
    ],
)  # fmt: skip
def test_the_most_specific_trace_is_the_cause(events, sightings, expected):
    assert diagnose(events, sightings, NODES) == expected


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        ("buckets/embedding/bias", "weights"),
        ("summed gradient of embedding/bias", "gradients"),
        ("gradient of layers/router_bias", "gradients"),
        ("router_bias_LX", "balancing biases"),
        ("rows of the batch", "inputs"),
        ("order of the batch", "order of the batches"),
        ("ema/x", "ema/x"),
    ],
)
def test_corrupted_tensors_have_kinds(tensor, what):
    assert diagnose([corrupted(tensor, "n1")], [], NODES) == Diagnosis(f"corrupted {what}", ("n1",))

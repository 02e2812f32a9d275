"""Runs under SLURM with the users' script: after each fault the run equals the undisturbed one."""

import json
import os
import pathlib
import re
import sys
import tempfile
import time

import numpy as np
import pytest
from groups import last_step, rows, write_config
from slurm_cluster import NODES, SlurmCluster, is_here

from zaya_jax.aegis.agent.sightings import Sighting, write_sighting
from zaya_jax.checkpoint import WEIGHTS, compare
from zaya_jax.checkpoint.newest import require_whole
from zaya_jax.checkpoint.stored_arrays import StoredArrays
from zaya_jax.run_folder.events import read_events
from zaya_jax.run_folder.names import BEGAN, DECIDED

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(not is_here(), reason="needs slurm-wlm, and root to begin its daemons"),
]
ROOT = pathlib.Path(__file__).parents[2]
LIMIT_SECONDS = 400


@pytest.fixture(scope="module")
def cluster():
    # Not pytest's folder, because a socket's path must be short. Files of exiting daemons may remain.
    holder = tempfile.TemporaryDirectory(prefix="sl", ignore_cleanup_errors=True)
    with holder as folder, SlurmCluster(pathlib.Path(folder)) as cluster:
        yield cluster


class Job:
    """A job of `configs/cluster/slurm.sh` with two nodes per run."""

    def __init__(self, cluster, corpus, folder, *, fault="", words=(), least=2, nodes=4, exclude=()):
        self.cluster, self.folder, self.output = cluster, folder / "run", folder / "job.out"
        config = write_config(self.folder, corpus, log_every=1, num_steps=20)
        compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
        cluster.environment |= {
            "PATH": f"{pathlib.Path(sys.executable).parent}:{cluster.environment['PATH']}",
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": compiled,
            "ZAYA_FAULT": fault,
            "ZAYA_NODES": "2",
            "ZAYA_MIN_NODES": str(least),
            "ZAYA_CLUSTER": str(ROOT / "configs/cluster"),
        }
        sizes = (f"--nodes={nodes}", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1")
        if exclude:
            sizes += (f"--exclude={','.join(exclude)}",)
        said = cluster.run(
            "sbatch", "--parsable", *sizes, "--time=60", f"--output={self.output}",
            str(ROOT / "configs/cluster/slurm.sh"), f"--config={config}", *words,
        )  # fmt: skip
        self.number = said.strip()
        assert self.number.isdecimal(), said

    def said(self):
        return self.output.read_text() if self.output.exists() else ""

    def wait_for(self, is_so):
        deadline = time.monotonic() + LIMIT_SECONDS
        while not is_so():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)

    def wait_for_step(self, step):
        self.wait_for(lambda: last_step(self.folder) >= step)

    def finish(self):
        """Waits for the end of the job, and lets it start at once when it is requeued."""

        def is_over():
            state = self.cluster.job_state(self.number)
            if state == "PENDING":
                self.cluster.run("scontrol", "update", f"jobid={self.number}", "StartTime=now")
            return state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "GONE")

        self.wait_for(is_over)
        # A requeued job is shown as failed for a moment.
        while self.cluster.job_state(self.number) != "COMPLETED":
            time.sleep(5)
            if is_over():
                break
            self.wait_for(is_over)
        assert self.cluster.job_state(self.number) == "COMPLETED", self.said()
        return self.said()


@pytest.fixture(scope="module")
def undisturbed(cluster, corpus, tmp_path_factory):
    """With the same script, whose compiler flags affect rounding."""
    job = Job(cluster, corpus, tmp_path_factory.mktemp("undisturbed"))
    assert "restart" not in job.finish()
    return job.folder


def assert_as(undisturbed, folder):
    """Compares all metric rows, and the bits of the last checkpoint's weights."""
    assert rows(folder) == rows(undisturbed)
    ours, theirs = (require_whole(each) for each in (folder, undisturbed))
    assert ours.step == theirs.step == 20
    assert compare(StoredArrays(ours, WEIGHTS), StoredArrays(theirs, WEIGHTS)).is_equal


def seconds_to_first_step(folder):
    """Returns the times from the last event of each attempt to the first step of the next one."""
    events = read_events(folder)
    begins = [n for n, event in enumerate(events) if event["event"] == BEGAN][1:]
    return [events[n + 1]["time"] - events[n - 1]["time"] for n in begins if n + 1 < len(events)]


@pytest.mark.parametrize(
    "fault", ["kill@step=10:process=1", "kill@step=10:process=0", "hang@step=10:process=1"]
)
def test_a_process_that_dies_or_hangs(fault, cluster, corpus, undisturbed, tmp_path):
    job = Job(cluster, corpus, tmp_path, fault=fault, words=("--config.watch.min_seconds=5",))
    said = job.finish()
    assert "restart: the run ended with code" in said
    assert_as(undisturbed, job.folder)
    print(f"{fault}: {seconds_to_first_step(job.folder)} s")


def test_a_job_whose_time_ends_saves_and_is_queued_again(cluster, corpus, undisturbed, tmp_path):
    job = Job(cluster, corpus, tmp_path, fault="hang@step=10:seconds=8")
    job.wait_for_step(8)
    cluster.run("scancel", "--batch", "--signal=TERM", job.number)
    said = job.finish()
    assert "is no folder" not in said  # the agents were present from the beginning
    (step,) = map(int, re.findall(r"saved at step (\d+); run the same command again to resume\n", said))
    assert f"resuming at step {step}" in said
    assert "requeue: asked to stop" in said
    assert_as(undisturbed, job.folder)


@pytest.mark.parametrize("least", [2, 1])
def test_a_node_that_dies(least, cluster, corpus, undisturbed, tmp_path):
    """A spare node replaces it; without one, and if allowed, the run continues on fewer nodes."""
    usable = [node for node in NODES if cluster.state(node) in ("idle", "alloc", "mix")]
    job = Job(
        cluster, corpus, tmp_path, fault="hang@step=10:process=1:seconds=60", least=least,
        nodes=3 if least == 2 else 2,
    )  # fmt: skip
    job.wait_for_step(9)
    used = re.findall(r"attempt 1 on (\S+), (\S+)", job.said())[0]
    cluster.kill_node(used[1])
    said = job.finish()
    again = re.findall(r"attempt 2 on (.+)", said)[0].split(", ")
    assert used[1] not in again
    assert len(again) == least
    if least == 2:
        assert_as(undisturbed, job.folder)
    else:
        losses = [[row["loss"] for row in rows(each)] for each in (job.folder, undisturbed)]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    cluster.begin_node(used[1])
    cluster.run("scontrol", "update", f"nodename={used[1]}", "state=resume")
    assert len(usable) >= 3


def test_a_node_that_will_fail_is_drained_and_not_used_again(cluster, corpus, undisturbed, tmp_path):
    """After a report of correctable errors, the run saves and leaves the node; so does the next job."""
    job = Job(cluster, corpus, tmp_path, fault="hang@step=10:seconds=10", nodes=3)
    job.wait_for_step(9)
    first, failing = re.findall(r"attempt 1 on (\S+), (\S+)", job.said())[0]
    seen = Sighting(time.time(), failing, "ecc_correctable", "drain", "sensor", "120 in an hour")
    write_sighting(job.folder, seen)
    said = job.finish()
    assert f"leave out: without {failing}" in said
    assert failing not in re.findall(r"attempt 2 on (.+)", said)[0]
    assert first in re.findall(r"attempt 2 on (.+)", said)[0]
    assert cluster.state(failing) in ("drain", "drained", "drng", "draining")
    assert_as(undisturbed, job.folder)
    decided = [event for event in read_events(job.folder) if event["event"] == DECIDED]
    assert decided[0]["nodes"] == [failing]
    assert json.dumps(decided[0]["evidence"]).count("120 in an hour") == 1
    cluster.run("scontrol", "update", f"nodename={failing}", "state=resume")

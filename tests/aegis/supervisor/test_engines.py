"""The SLURM engine, with fake commands that record their arguments."""

import signal
import sys
import threading

import pytest

from zaya_jax.aegis.supervisor.engines import LocalEngine, SlurmEngine
from zaya_jax.commands.supervise import main
from zaya_jax.errors import UserError
from zaya_jax.parallel.processes.launch import Launch

SCRIPTS = {
    "scontrol": 'echo "scontrol $*" >>$LOG',
    "scancel": 'echo "scancel $*" >>$LOG; touch $LOG.signaled',
    "sinfo": "if [[ $* == *--nodes=rack1n02* ]]; then echo down\\*; else echo alloc; fi",
    "srun": (
        'echo "srun $*" >>$LOG; while [[ $* == *until-signaled* && ! -e $LOG.signaled ]]; do sleep 0.01; done'
    ),
}


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job on three nodes, of which the second is down; a function that returns the calls."""
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "rack[1-2]n[01-02]-ib,rack1n02,login")
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE", raising=False)
    return lambda: (tmp_path / "log").read_text().splitlines()


def test_nodes_that_respond(job):
    engine = SlurmEngine(["train"], "rules.toml")
    assert engine.nodes() == ["rack1n01-ib", "rack2n01-ib", "rack2n02-ib", "login"]
    assert engine.drain("rack2n02-ib", "ECC") is None
    assert job() == ["scontrol update nodename=rack2n02-ib state=drain reason=zaya: ECC"]
    assert engine.drain("rack3n01-ib", "ECC") == "rack3n01-ib is not a node of this job"


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ("8(x6)", "--nodes=2 --ntasks=16 --ntasks-per-node=8 --nodelist=rack2n01-ib,login "),
        ("4,8(x5)", "--nodes=2 --ntasks=16 --ntasks-per-node=8 --nodelist=rack2n01-ib,login "),
        (
            "4,8,2,1(x3)",
            "--nodes=2 --ntasks=3 --distribution=arbitrary --nodelist=rack2n01-ib,rack2n01-ib,login ",
        ),
    ],
)
def test_each_node_runs_its_number_of_tasks(job, monkeypatch, counts, words):
    """SLURM 22.05 starts 4 and 8 tasks for names repeated under `--distribution=arbitrary`."""
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", counts)
    SlurmEngine(["train"], "rules.toml").run(["rack2n01-ib", "login"], lambda *_: None)
    (call,) = job()
    assert words in call


@pytest.mark.parametrize(("task", "name"), [(None, "7"), ("0", "7_0"), ("12", "7_12")])
def test_signals_and_requeues_address_only_this_job(job, monkeypatch, task, name):
    """The ID of one task of an array equals that of the array, and would address all of its tasks."""
    if task is not None:
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task)
    engine = SlurmEngine(["until-signaled"], "rules.toml")
    running = threading.Thread(target=engine.run, args=(["login"], lambda *_: None))
    running.start()
    while running.is_alive():  # repeated, because the step may not have started yet
        engine.send_signal(signal.SIGTERM)
        running.join(0.01)
    engine.requeue()
    assert {line for line in job() if "srun" not in line} == {
        f"scancel --signal=TERM {name}",
        f"scontrol requeue {name}",
    }


@pytest.mark.parametrize(
    "missing", [["SLURM_JOB_ID"], ["SLURM_JOB_NODELIST"], ["SLURM_JOB_ID", "SLURM_JOB_NODELIST"]]
)
def test_missing_slurm_variables_are_named(job, monkeypatch, missing):
    for name in missing:
        monkeypatch.delenv(name)
    with pytest.raises(UserError, match=f"needs {' and '.join(missing)}, which SLURM sets in a job"):
        main(["--engine=slurm", "--", "train"])


def test_virtual_nodes_name_the_process_that_a_signal_ended():
    program = "import os, sys, time; print(os.environ['NODE_NAME'], file=sys.stderr, flush=True); "
    program += "os.environ['JAX_PROCESS_ID'] == '1' and os.kill(os.getpid(), 9); time.sleep(60)"
    launch = Launch([sys.executable, "-c", program], 2, grace_seconds=0.1)
    engine, lines = LocalEngine(launch, "rules.toml", 5), []
    assert engine.nodes() == ["node0", "node1", "node2", "node3", "node4"]
    assert engine.run(["node0", "node3"], lambda host, line: lines.append((host, line))) == 128 + 9
    assert {host: line for host, line in lines if "launch" not in line}.get("node3") == "node3\n"
    assert lines[-1] == ("node3", "launch: error: node3: process 1: Killed\n")
    assert engine.drain("node3", "it failed") is None
    assert "the only one" in str(LocalEngine(launch, "rules.toml").drain("here", "it failed"))

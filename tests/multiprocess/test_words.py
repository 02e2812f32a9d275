"""Messages between the processes of a run, and their numbers."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from groups import ROOT

from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.launch import Launch, find_causes, launch
from zaya_jax.parallel.processes.process_group import ProcessGroup, find_process_group, first_host
from zaya_jax.parallel.processes.stop_agreement import StopAgreement

SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "amd[007-009]",
    "SLURM_NTASKS": "24",
    "SLURM_PROCID": "13",
    "SLURM_LOCALID": "5",
    "SLURM_STEP_TASKS_PER_NODE": "8(x3)",
}
FLAGS = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}


@pytest.mark.parametrize(
    ("environment", "group"),
    [
        ({}, None),
        (FLAGS, ProcessGroup("a:1", 4, 2)),
        (FLAGS | SLURM, ProcessGroup("a:1", 4, 2)),
        (SLURM, ProcessGroup(f"amd007:{61440 + 70001 % 4096}", 24, 13, local_device=5)),
        # Devices were assigned already, or all devices of a node belong to its only task.
        (SLURM | {"ROCR_VISIBLE_DEVICES": "5"}, ProcessGroup("amd007:61809", 24, 13)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x24)"}, ProcessGroup("amd007:61809", 24, 13)),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        # In a batch script, outside of srun, a process is alone.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
        # A pod of a JobSet knows its number from a variable of Kubernetes.
        (
            {
                "JAX_COORDINATOR_ADDRESS": "zaya-0-0.zaya:1",
                "JAX_NUM_PROCESSES": "2",
                "JOB_COMPLETION_INDEX": "1",
            },
            ProcessGroup("zaya-0-0.zaya:1", 2, 1, hosts=("zaya-0-0.zaya", "zaya-0-1.zaya")),
        ),
    ],
)
def test_a_process_knows_its_number(environment, group):
    assert find_process_group(environment) == group


def test_options_precede_variables():
    assert find_process_group(FLAGS, coordinator="b:2", num_processes=3, process=0) == ProcessGroup(
        "b:2", 3, 0
    )


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"JAX_NUM_PROCESSES": "4"}, "JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID must be set too"),
        (FLAGS | {"JAX_PROCESS_ID": "4"}, "this is process 4 of 4; numbers start at 0 and end at 3"),
        (FLAGS | {"JAX_NUM_PROCESSES": "many"}, 'JAX_NUM_PROCESSES is "many"; it must be a whole number'),
        (FLAGS | {"JAX_COORDINATOR_ADDRESS": "host"}, 'the coordinator is "host"; it must be HOST:PORT'),
    ],
)
def test_invalid_numbers_are_rejected(environment, sentence):
    with pytest.raises(ValueError, match=sentence):
        find_process_group(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[01-16]", "n01"), ("n[003,7-9],m1", "n003"), ("a-b[2]", "a-b2")],
)
def test_the_first_of_slurms_nodes(nodes, first):
    assert first_host(nodes) == first


def test_a_single_process_receives_its_own_messages():
    assert hosts.gather("a", 1) == [1]
    assert hosts.broadcast_from_first("a", 2) == 2
    assert hosts.run_on_first("a", lambda: 3) == 3
    with StopAgreement() as agreement:
        assert agreement.reached(1) is None
        agreement.propose("stop")
        assert agreement.reached(1) == "stop"


def test_three_processes_exchange_messages():
    """Each receives all messages, a failure of one is reported to all, and a late one is named."""
    words = [sys.executable, "-c", "from zaya_jax.parallel.processes import launch as l; import sys; "
             "sys.exit(l.launch(l.Launch([sys.executable, *sys.argv[1:]], 3)))"]  # fmt: skip
    ended = subprocess.run(
        [*words, str(ROOT / "tests/multiprocess/words.py"), "1"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    actual = [json.loads(line[line.index("{") :]) for line in ended.stderr.splitlines() if "gathered" in line]
    assert len(actual) == 3
    for each in actual:
        assert each["gathered"] == [[i, i + 1, i + 2] for i in range(4)]
        assert each["first"] == {"of": 0}
        sentence, _ = each["shared"]
        assert sentence.startswith("process 1 on ")
        assert sentence.endswith("not the number one")
    assert sorted(each["shared"][1] for each in actual) == [False, False, True]
    assert len({each["stopped"] for each in actual}) == 1
    late = [each["late"] for each in actual if "late" in each]
    assert len(late) == 2
    assert all("waited 1 s at lunch for process 1 on " in sentence for sentence in late)


def test_a_launch_ends_all_when_one_fails_and_restarts_them(tmp_path):
    """The first attempt leaves a file from which the second one knows that it is the second."""
    program = (
        "import os, pathlib, sys, time\n"
        "file = pathlib.Path(sys.argv[1])\n"
        "number = os.environ['JAX_PROCESS_ID']\n"
        "if file.exists(): sys.exit(0)\n"
        "if number == '1': file.touch(); os.kill(os.getpid(), 9)\n"
        "time.sleep(60)\n"
    )
    given = Launch([sys.executable, "-c", program, str(tmp_path / "failed")], 3, grace_seconds=0.1)
    assert launch(given) == 128 + 9
    (tmp_path / "failed").unlink()
    assert launch(given, restarts=1) == 0


def test_a_launch_reports_the_cause_and_not_its_consequences():
    """jax aborts every process that loses process 0, often before process 0 has ended."""
    program = (
        "import os, sys, time\n"
        "if os.environ['JAX_PROCESS_ID'] == '1': os.abort()\n"
        "time.sleep(0.5)\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    for code, printed in ((75, 75), (0, 128 + signal.SIGABRT)):
        given = Launch([sys.executable, "-c", program, str(code)], 2, grace_seconds=5.0)
        assert launch(given) == printed


LEAVING = """
import atexit, sys, time
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.process_group import ProcessGroup
number = int(sys.argv[2])
with hosts.joined(ProcessGroup(sys.argv[1], 2, number), limit_seconds=60):
    # The service ends with process 0; the other one is slow to end even then.
    atexit.register(time.sleep, 1.5 * number)
    time.sleep(1.5 * (number == int(sys.argv[3])))
    sys.exit(75)
"""


@pytest.mark.parametrize("late", [0, 1])
def test_at_a_signal_all_leave_together(late):
    """Without the service of process 0 jax would abort the other one, also during its exit."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    both = [
        subprocess.Popen([sys.executable, "-c", LEAVING, place, str(number), str(late)], env=environment)
        for number in (0, 1)
    ]
    assert [each.wait(timeout=100) for each in both] == [75, 75]


@pytest.mark.parametrize(
    ("failed", "causes"),
    [
        ({}, []),
        ({2: -9, 0: 75, 1: 75}, [2]),
        ({1: -6, 2: -6, 0: -9}, [0]),
        ({3: -9, 1: -9, 0: 75}, [3, 1]),
        ({2: -6, 0: 75, 1: -6}, [2]),
        ({2: 75, 0: 75}, [2]),
        ({1: 1, 0: 75}, [1]),
    ],
)
def test_causes_precede_consequences(failed, causes):
    """Others exit as resumable when they lose a process, or jax aborts them."""
    assert find_causes(failed) == causes

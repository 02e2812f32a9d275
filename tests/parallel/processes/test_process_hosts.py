"""Hosts of all processes, as far as the environment of one process tells them."""

import pytest

from zaya_jax.parallel.processes.listeners import PARENT_PORTS, parent_port
from zaya_jax.parallel.processes.process_group import find_process_group

STEP = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "amd[007-009]",
    "SLURM_STEP_TASKS_PER_NODE": "2,4(x2)",
    "SLURM_NTASKS": "10",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "7",
    "SLURM_LOCALID": "1",
    "SLURMD_NODENAME": "amd009",
}
"""Environment of task 7, the second one of the third node."""
HOSTS = ("amd007",) * 2 + ("amd008",) * 4 + ("amd009",) * 4
POD = {
    "JAX_COORDINATOR_ADDRESS": "zaya-node-0-0.zaya:61440",
    "JAX_NUM_PROCESSES": "3",
    "JOB_COMPLETION_INDEX": "2",
}


def hosts(environment, **flags) -> tuple[str, ...]:
    group = find_process_group(environment, **flags)
    assert group is not None
    return group.hosts


@pytest.mark.parametrize(
    "changes", [{}, {"SLURM_DISTRIBUTION": "block"}, {"SLURM_DISTRIBUTION": "block:cyclic"}]
)
def test_slurm_places_blocks_of_tasks_on_nodes(changes):
    assert hosts(STEP | changes) == HOSTS


def test_slurms_default_without_more_tasks_than_nodes_is_cyclic():
    environment = STEP | {
        "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_NTASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
        "SLURM_DISTRIBUTION": "cyclic",
    }  # fmt: skip
    assert hosts(environment) == ("amd007", "amd008", "amd009")


@pytest.mark.parametrize(
    "changes",
    [
        *({"SLURM_DISTRIBUTION": each} for each in ("cyclic", "plane=2", "arbitrary", "*", "cyclic:block")),
        # The placement of this task is none of a block.
        *({"SLURM_NODEID": each} for each in ("0", "1", "3", "-1")),
        {"SLURM_PROCID": "2"},
        {"SLURM_LOCALID": "2"},
        {"SLURMD_NODENAME": "amd008"},
        # A component of a heterogeneous step: other nodes have the rest.
        {"SLURM_NTASKS": "12"},
        {"SLURM_STEP_NODELIST": "amd[007-008]"},
        {"SLURM_STEP_TASKS_PER_NODE": "5(x2)"},
    ],
    ids=str,
)
def test_another_distribution_of_tasks_tells_no_hosts(changes):
    assert hosts(STEP | changes) == ()


def test_a_task_without_its_node_knows_no_hosts():
    assert hosts({name: value for name, value in STEP.items() if name != "SLURM_NODEID"}) == ()


@pytest.mark.parametrize(
    ("coordinator", "expected"),
    [
        ("zaya-node-0-0.zaya:61440", tuple(f"zaya-node-0-{number}.zaya" for number in range(3))),
        ("train-0.svc.cluster.local:5", tuple(f"train-{number}.svc.cluster.local" for number in range(3))),
        ("train-0:5", ("train-0", "train-1", "train-2")),
        # No name of pod 0.
        ("train-10.train:5", ()),
        ("coordinator.train-0:5", ()),
        ("10.0.0.0:5", ()),
        ("[fd00::7]:5", ()),
    ],
)
def test_pods_of_an_indexed_job_have_names_with_their_index(coordinator, expected):
    assert hosts(POD | {"JAX_COORDINATOR_ADDRESS": coordinator}) == expected


def test_the_name_of_a_host_alone_tells_nothing():
    """The process number comes from a flag or jax's variable, and need not be an index of a job."""
    assert hosts(POD, process=1) == hosts(POD | {"JAX_PROCESS_ID": "1"}) == ()


def test_a_local_run_has_one_host():
    assert hosts({}, coordinator="127.0.0.1:5", num_processes=3, process=1) == ("127.0.0.1",) * 3
    assert hosts({}, coordinator="localhost:5", num_processes=2, process=1) == ("localhost",) * 2
    assert hosts({}, coordinator="node7:5", num_processes=3, process=1) == ()


def test_ports_of_one_host_differ_and_runs_next_to_each_other_have_others():
    ports = [parent_port("amd007:61440", process) for process in range(len(PARENT_PORTS))]
    assert set(ports) == set(PARENT_PORTS)
    # Those that the kernel chooses, of which any may be in use, and those of SLURM jobs' coordinators.
    assert max(PARENT_PORTS) < 32768
    following = [parent_port(f"amd007:{61440 + job}", 0) for job in range(100)]
    assert len({port // 8 for port in following}) > 80

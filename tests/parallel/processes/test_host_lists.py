"""SLURM's variables: host lists compared with scontrol, task counts, and names of array jobs."""

import itertools
import json
import os
import pathlib
import random
import shutil
import subprocess

import pytest

from zaya_jax.errors import UserError
from zaya_jax.parallel.processes.process_group import find_process_group
from zaya_jax.parallel.processes.slurm import expand_counts, expand_hosts, find_job

PAIRS = [
    json.loads(line)
    for line in (pathlib.Path(__file__).parent / "slurm_host_lists.jsonl").read_text().splitlines()
]
"""Lists with the output of `scontrol show hostnames` of SLURM 22.05; null for lists that it rejected."""


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["list"])
def test_hosts_are_those_of_scontrol(pair):
    if pair["hosts"] is None:
        with pytest.raises(UserError, match="the host list is "):
            expand_hosts(pair["list"])
    else:
        assert expand_hosts(pair["list"]) == pair["hosts"]


def random_list(rng):
    """Returns a random list of one to three entries with up to four brackets each."""

    def bracket():
        parts = []
        for _ in range(rng.randint(1, 3)):
            first, width = rng.randint(0, 120), rng.choice([1, 1, 2, 3, 4])
            last = "" if rng.random() < 0.4 else f"-{first + rng.randint(0, 3):0{rng.choice([1, width])}}"
            parts.append(f"{first:0{width}}{last}")
        return f"[{','.join(parts)}]"

    entries = []
    for _ in range(rng.randint(1, 3)):
        pieces = [rng.choice(["n", "rack", "gpu-a-", "x1c", "n.", "r_2-"]) + bracket() for _ in range(4)]
        entries.append(rng.choice(["", rng.choice(["a", "b-"]) + bracket()]) + pieces[0])
        entries[-1] += "".join(pieces[1 : rng.choice([1, 1, 1, 2])])
    return rng.choice([",", ", "]).join([*entries, *rng.choice([[], ["login1"]])])


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs slurm-client")
def test_random_lists_are_those_of_the_installed_scontrol(tmp_path):
    (tmp_path / "slurm.conf").write_text("ClusterName=t\nSlurmctldHost=localhost\nNodeName=n1\n")
    rng = random.Random(0)
    for _ in range(100):
        text = random_list(rng)
        done = subprocess.run(
            ["scontrol", "show", "hostnames", text],
            env=os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")},
            capture_output=True,
            text=True,
            check=True,
        )
        assert expand_hosts(text) == done.stdout.split(), text


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        # 22.05 refuses a suffix; newer versions print and read it.
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("n[09-10].cluster.local,m", ["n09.cluster.local", "n10.cluster.local", "m"]),
        ("rack[1-2]n[1,3]x", ["rack1n1x", "rack1n3x", "rack2n1x", "rack2n3x"]),
        ("a[1]b[2-3]c4", ["a1b2c4", "a1b3c4"]),
        ("p[4-5]q3,p6", ["p4q3", "p5q3", "p6"]),
    ],
)
def test_a_suffix_is_part_of_each_name(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ",",
            " ",
            "[",
            "n[1-2",
            "n[1-]",
            "n]1-2[",
            "n[1-2][",
            "n[+1]",
            "n[1-99999999]",
            "n[1-9999]m[1-9]",
        ),
        *(f"n[{'9' * 30}]", "n[" * 20_000, ",".join(["n[1-60000]"] * 2)),
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_list_is_refused(text):
    with pytest.raises(UserError, match=r"^the host list is "):
        expand_hosts(text)


COUNTS = [
    ("1", [1]),
    ("8", [8]),
    ("8(x1)", [8]),
    ("8(x17)", [8] * 17),
    ("4,8(x2)", [4, 8, 8]),
    ("8(x2),4", [8, 8, 4]),
    ("1,2,3", [1, 2, 3]),
    ("2(x2),1(x3),128", [2, 2, 1, 1, 1, 128]),
    ("8(x1000)", [8] * 1000),
]


@pytest.mark.parametrize(("text", "counts"), COUNTS)
def test_task_counts_are_repeated(text, counts):
    assert expand_counts(text) == counts


@pytest.mark.parametrize(
    "text", ["", "0", "8(x0)", "8x2", "8(2)", "4,,8", "four", "-1", "8(x99999999)", "8 8"]
)
def test_other_task_counts_are_refused(text):
    with pytest.raises(UserError, match=r"it must be counts of tasks per node, such as"):
        expand_counts(text)


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "rack[1-2]n[1-2]"}


@pytest.mark.parametrize(
    ("changes", "tasks"),
    [
        ({}, (1, 1, 1, 1)),
        ({"SLURM_NTASKS_PER_NODE": "8"}, (8, 8, 8, 8)),
        ({"SLURM_TASKS_PER_NODE": "8(x4)"}, (8, 8, 8, 8)),
        ({"SLURM_TASKS_PER_NODE": "4,8(x2),4"}, (4, 8, 8, 4)),
        ({"SLURM_TASKS_PER_NODE": "4,8(x3)", "SLURM_NTASKS_PER_NODE": "2"}, (2, 2, 2, 2)),
    ],
)
def test_a_job_has_hosts_and_their_tasks(changes, tasks):
    job = find_job(JOB | changes)
    assert job.hosts == ("rack1n1", "rack1n2", "rack2n1", "rack2n2")
    assert job.tasks == tasks


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({}, "needs SLURM_JOB_ID and SLURM_JOB_NODELIST, which SLURM sets in a job; .*sbatch"),
        ({"SLURM_JOB_ID": "7"}, "needs SLURM_JOB_NODELIST, which"),
        ({"SLURM_JOB_ID": "", "SLURM_JOB_NODELIST": "n1"}, "needs SLURM_JOB_ID, which"),
        (JOB | {"SLURM_JOB_NODELIST": "n[1-"}, r'SLURM_JOB_NODELIST is "n\[1-"; it must be a list of hosts'),
        (JOB | {"SLURM_TASKS_PER_NODE": "8(x3)"}, r'SLURM_TASKS_PER_NODE is "8\(x3\)", 3 nodes; .* has 4'),
        (JOB | {"SLURM_NTASKS_PER_NODE": "many"}, 'SLURM_NTASKS_PER_NODE is "many"; it must be counts'),
    ],
)
def test_what_is_no_job_is_one_sentence(environment, sentence):
    with pytest.raises(UserError, match=sentence):
        find_job(environment)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "7"),
        ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "7_2"),  # its ID is that of the array
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}, "7_0"),
    ],
)
def test_a_job_of_an_array_is_named_by_its_task(changes, name):
    assert find_job(JOB | changes).name == name


@pytest.mark.parametrize(
    ("counts", "device"), [("1(x3)", None), ("8(x3)", 3), ("4,8(x2)", 3), ("1,8(x2)", 3), ("8(x2),1", 3)]
)
def test_a_task_shares_its_nodes_devices_where_any_node_has_several(counts, device):
    environment = {
        "SLURM_JOB_ID": "5000", "SLURM_STEP_NODELIST": "rack[1-2]n[01-04]", "SLURM_NTASKS": "20",
        "SLURM_PROCID": "7", "SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": counts,
    }  # fmt: skip
    group = find_process_group(environment)
    assert group is not None
    assert (group.coordinator, group.process, group.local_device) == (f"rack1n01:{61440 + 904}", 7, device)


def test_names_of_many_brackets_are_all_different():
    names = expand_hosts("a[0-4]b[0-4]c[0-4]d[0-4]")
    assert sorted(names) == sorted(
        f"a{i}b{j}c{k}d{m}" for i, j, k, m in itertools.product(range(5), repeat=4)
    )

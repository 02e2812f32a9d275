"""Configuration files for clusters: environment files, the SLURM script, and the JobSet manifest."""

import copy
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

CLUSTER = pathlib.Path(__file__).parents[2] / "configs/cluster"
ENVIRONMENTS = ("rocm.env", "pollara.env", "connectx.env")


def variables(name):
    """Returns the variables of an env file, parsed as by Kubernetes."""
    lines = [line for line in (CLUSTER / name).read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_variable_has_a_comment(name):
    above = ""
    for line in (CLUSTER / name).read_text().splitlines():
        if re.match(r"[A-Z]", line):
            assert above, f"{line} has no comment above it"
            assert '"' not in line
            assert "'" not in line
        above = line


def test_the_flags_are_known_to_this_xla():
    flags = variables("rocm.env")["XLA_FLAGS"]
    program = "import jax; assert jax.devices()"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:500]


@pytest.fixture
def cluster(tmp_path):
    """Fake SLURM commands for four nodes, which record their arguments."""
    tools = tmp_path / "bin"
    tools.mkdir()
    scripts = {
        "scontrol": 'echo "scontrol $*" >>$LOG',
        # The first node goes down with the first attempt.
        "sinfo": 'if [[ $* == *n1* && -s $LOG ]]; then echo "down*"; else echo alloc; fi',
        "srun": (
            '[[ $* == *"aegis agent"* ]] && exec /bin/sleep 60\n'
            'echo "srun $*" >>$LOG\n'
            "echo $$ >$LOG.pid\n"
            'trap "echo signaled >>$LOG; exit 75" TERM\n'
            "code=$(head -n 1 $CODES); sed -i 1d $CODES\n"
            "if [[ $code == wait ]]; then for i in $(seq 200); do sleep 0.05; done; fi\n"
            'if [[ $code == ecc ]]; then echo "n2: 3 uncorrectable errors detected" >&2; code=1; fi\n'
            "exit $code"
        ),
        "scancel": 'echo "scancel $*" >>$LOG; kill -TERM $(cat $LOG.pid)',
        "zaya": f'exec {sys.executable} -m zaya_jax.cli "$@"',
    }
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tools / name).chmod(0o755)
    return tmp_path


def begin(cluster, codes, *words, nodes=3):
    (cluster / "codes").write_text("".join(f"{code}\n" for code in codes))
    (cluster / "log").write_text("")
    (cluster / "run").mkdir()
    return subprocess.Popen(
        [str(CLUSTER / "slurm.sh"), f"--config.run_folder={cluster / 'run'}", *words],
        env=os.environ
        | {"PATH": f"{cluster / 'bin'}:{os.environ['PATH']}", "LOG": str(cluster / "log")}
        | {
            "CODES": str(cluster / "codes"),
            "SLURM_JOB_NODELIST": "n[1-4]",
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS_PER_NODE": "8",
        }
        | {"ZAYA_CLUSTER": str(CLUSTER), "ZAYA_NODES": str(nodes)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def calls(cluster):
    return (cluster / "log").read_text().splitlines()


def test_the_next_attempt_omits_a_node_that_is_down(cluster):
    script = begin(cluster, [124, 0], "--config.data.source=with space")
    output, _ = script.communicate(timeout=60)
    assert script.returncode == 0, output
    first, second = calls(cluster)
    assert (
        "srun --nodes=3 --ntasks=24 --ntasks-per-node=8 --nodelist=n1,n2,n3 --overlap --kill-on-bad-exit=1"
        in first
    )
    assert "--nodelist=n2,n3,n4" in second
    assert second.endswith(f"train --config.run_folder={cluster / 'run'} --config.data.source=with space")
    assert "restart: the run ended with code 124: it stalled" in output


def test_a_node_whose_memory_fails_is_drained_and_not_used_again(cluster):
    """Later jobs of the run exclude it as well."""
    script = begin(cluster, ["ecc", 0], nodes=2)
    output, _ = script.communicate(timeout=60)
    assert script.returncode == 0, output
    first, drained, second = calls(cluster)
    assert "--nodelist=n1,n2 " in first
    assert drained == "scontrol update nodename=n2 state=drain reason=zaya: without n2"
    assert "--nodelist=n3,n4 " in second  # the first one is down
    assert (cluster / "run/left_out.txt").read_text() == "n2\n"
    assert "n2: ecc_uncorrectable: n2: 3 uncorrectable errors detected" in output


@pytest.mark.parametrize("code", [2, 65])
def test_permanent_failures_are_not_restarted(cluster, code):
    script = begin(cluster, [code])
    script.communicate(timeout=60)
    assert script.returncode == code
    assert len(calls(cluster)) == 1


def test_a_requested_stop_saves_and_requeues_the_job(cluster):
    script = begin(cluster, ["wait"])
    deadline = time.monotonic() + 30
    while not calls(cluster):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)  # until it waits
    script.send_signal(signal.SIGTERM)
    script.communicate(timeout=60)
    assert script.returncode == 75
    assert calls(cluster)[1:] == ["scancel --signal=TERM 7", "signaled", "scontrol requeue 7"]


def manifests():
    return list(yaml.safe_load_all((CLUSTER / "jobset.yaml").read_text()))


def test_the_jobset_matches_its_schema():
    """Kubernetes' own types of JobSets, jobs, pods and containers know all fields."""
    jobset, *_ = manifests()
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert JobsetV1alpha2JobSet.from_dict(jobset).to_dict() == jobset
    # The types drop unknown fields, and reject values of wrong types.
    unknown, wrong = copy.deepcopy(jobset), copy.deepcopy(jobset)
    unknown["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
    assert JobsetV1alpha2JobSet.from_dict(unknown).to_dict() != unknown
    wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] = "many"
    with pytest.raises(ValueError, match="parallelism"):
        JobsetV1alpha2JobSet.from_dict(wrong)


def test_agents_have_minimal_permissions():
    jobset, account, nodes, bound_nodes, pods, bound_pods = manifests()
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert template["serviceAccountName"] == account["metadata"]["name"]
    for bound, role in ((bound_nodes, nodes), (bound_pods, pods)):
        assert bound["roleRef"] == {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": role["kind"],
            "name": role["metadata"]["name"],
        }
        assert bound["subjects"][0]["name"] == account["metadata"]["name"]
    assert [(rule["resources"], rule["verbs"]) for rule in nodes["rules"]] == [(["nodes"], ["get", "patch"])]
    assert [(rule["resources"], rule["verbs"]) for rule in pods["rules"]] == [(["pods"], ["delete"])]


def test_the_jobset_is_consistent():
    """Numbers and names that must be equal are equal."""
    jobset, *_ = manifests()
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    (container,) = spec["template"]["spec"]["containers"]
    environment = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert int(environment["JAX_NUM_PROCESSES"]) == spec["parallelism"] == spec["completions"]
    # Pods are called JOBSET-JOB-REPLICA-INDEX, and found below the JobSet's name.
    name = jobset["metadata"]["name"]
    assert environment["JAX_COORDINATOR_ADDRESS"].startswith(f"{name}-{job['name']}-0-0.{name}:")
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert rule["onExitCodes"]["values"] == [2, 65]
    volumes = {each["name"] for each in spec["template"]["spec"]["volumes"]}
    (agent,) = spec["template"]["spec"]["initContainers"]
    assert volumes == {each["name"] for one in (container, agent) for each in one["volumeMounts"]}
    (folder,) = [each for each in container["args"] if each.startswith("--config.run_folder=")]
    assert agent["command"] == ["zaya", "aegis", "agent", folder.partition("=")[2], "--kubernetes"]
    assert {each["name"] for each in agent["env"]} == {"POD_NAME", "POD_NAMESPACE", "NODE_NAME"}

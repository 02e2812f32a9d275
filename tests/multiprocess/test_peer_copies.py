"""Four processes on different nodes, one of which is killed: what a restart reads, and from where.

pytest -n 0 -s -m campaign tests/multiprocess/test_peer_copies.py
"""

import pathlib
import shutil
import sys
import tempfile

import jax
import numpy as np
import pytest
from groups import finish, rows, start, start_words, write_config

from zaya_jax.checkpoint import all_steps, load_run
from zaya_jax.run_folder.events import read_events
from zaya_jax.run_folder.names import AT, BEGAN, DAMAGED, RESTORED

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3600)]
PROCESSES, COPIED, SAVED, KILLED, STEPS = 4, 9, 8, 12, 16
SETTINGS = {"num_steps": STEPS, "checkpoint_every": SAVED, "eval_every": 6, "eval_sequences": 4}
PROGRAM = (
    "import sys; from zaya_jax.parallel.processes.launch import *; "
    "sys.exit(launch(Launch(sys.argv[3:], int(sys.argv[1]), int(sys.argv[2]), grace_seconds=20)))"
)
ON_NODE = 'NODE_NAME=node$JAX_PROCESS_ID exec "$@"'


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    code, output = finish(start(write_config(folder, corpus, **SETTINGS), processes=1, devices=4))
    assert code == 0, output
    return folder


class Nodes:
    """A run whose processes are on different nodes, as the state after a kill that is restored for each test.

    Args:
      folder: folder of the run.
      memory: folder with a folder for each node's memory.
      config: config file.
    """

    def __init__(self, folder: pathlib.Path, memory: pathlib.Path, config: pathlib.Path):
        self.folder, self.memory, self._config = folder, memory, config
        self._places = {folder: folder.with_name("killed run"), memory: folder.with_name("killed memory")}

    def run(self, *, processes: int = PROCESSES) -> tuple[int, str]:
        devices = PROCESSES // processes
        words = f"--config={self._config}", "--config.train.peer_copies_every=3"
        words = [*words, f"--config.train.peer_copies_folder={self.memory}/{{host}}"]
        train = [sys.executable, "-m", "zaya_jax.cli", "train", *words]
        launch = [sys.executable, "-c", PROGRAM, str(processes), str(devices), "sh", "-c", ON_NODE, "sh"]
        return finish(start_words([*launch, *train]))

    def keep(self) -> None:
        for place, kept in self._places.items():
            shutil.copytree(place, kept)

    def restore(self) -> None:
        for place, kept in self._places.items():
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(kept, place)

    def lose(self, *processes: int) -> None:
        for process in processes:
            shutil.rmtree(self.memory / f"node{process}")

    def copy(self, process: int, owner: int, step: int = COPIED) -> pathlib.Path:
        (path,) = (self.memory / f"node{process}").glob(f"*/{owner}-{step}-*.copy")
        return path

    def events(self, kind: str) -> list[dict]:
        return [event for event in read_events(self.folder) if event["event"] == kind]


@pytest.fixture(scope="module")
def killed(corpus, tmp_path_factory):
    """A run that was killed when the copies of step 9 were complete."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        nodes = Nodes(folder, pathlib.Path(memory) / "nodes", write_config(folder, corpus, **SETTINGS))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ZAYA_FAULT", f"kill@step={KILLED}:process=2")
            code, output = nodes.run()
        assert code == 137, output
        assert all_steps(folder) == [SAVED]
        steps = [COPIED - 3, COPIED]
        for process in range(PROCESSES):
            assert all(
                nodes.copy(each, process, step) for each in (process, (process + 1) % 4) for step in steps
            )
        nodes.keep()
        yield nodes


@pytest.fixture
def nodes(killed) -> Nodes:
    killed.restore()
    return killed


def assert_ends_as(undisturbed: pathlib.Path, nodes: Nodes, *, processes: int = PROCESSES) -> str:
    code, output = nodes.run(processes=processes)
    assert code == 0, output
    assert rows(nodes.folder) == rows(undisturbed)
    ours, theirs = (load_run(each).variables for each in (nodes.folder, undisturbed))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    began, first = nodes.events(BEGAN)[-1], next(e for e in reversed(nodes.events(AT)))
    assert first["step"] > began["step"]
    print(f"\nrestored step {began['step']}: {began['seconds']['restore']:.2f} s of the restart")
    # A run that has ended with its checkpoint frees the memory of the nodes that it uses.
    assert not [path for n in range(processes) for path in (nodes.memory / f"node{n}").rglob("*.copy")]
    return output


def test_a_lost_node_restores_from_its_neighbor_and_nothing_from_storage(nodes, undisturbed):
    nodes.lose(2)
    shutil.rmtree(nodes.folder / "checkpoints")
    output = assert_ends_as(undisturbed, nodes)
    assert f"resuming at step {COPIED} from copies in the memory of the nodes" in output
    (event,) = nodes.events(RESTORED)
    print(event)
    assert event["step"] == COPIED
    assert event["bytes_from_own_node"] == 3 * event["bytes_from_peers"] > 0 == event["bytes_from_storage"]
    assert not nodes.events(DAMAGED)


def test_a_damaged_copy_is_named_and_that_of_the_neighbor_is_read(nodes, undisturbed):
    path = nodes.copy(1, owner=1)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)
    output = assert_ends_as(undisturbed, nodes)
    assert "that of process 1 at step 9, kept by process 1 on node1: its checksum differs" in output
    (event,) = nodes.events(RESTORED)
    assert (event["step"], event["bytes_from_peers"]) == (COPIED, len(content) - content.index(b"\n") - 1)
    assert [event["step"] for event in nodes.events(DAMAGED)] == [COPIED]


def test_without_an_intact_copy_the_checkpoint_is_read_unless_older_copies_are_newer(nodes, undisturbed):
    nodes.lose(2)
    path = nodes.copy(3, owner=2)
    path.write_bytes(path.read_bytes()[:-1])
    output = assert_ends_as(undisturbed, nodes)
    assert "kept by process 3 on node3" in output
    assert f"checkpoint {SAVED} is newer than the peer copies, which are of {COPIED - 3}" in output

    nodes.restore()
    nodes.lose(2)
    path.write_bytes(path.read_bytes()[:-1])
    shutil.rmtree(nodes.folder / "checkpoints")
    assert_ends_as(undisturbed, nodes)
    assert [event["step"] for event in nodes.events(RESTORED)] == [COPIED - 3]


def test_two_adjacent_nodes_restore_from_the_checkpoint(nodes, undisturbed):
    nodes.lose(2, 3)
    output = assert_ends_as(undisturbed, nodes)
    assert "no peer copies are used: none is left of process 2; resuming from the storage" in output
    assert f"resuming at step {SAVED}" in output
    assert not nodes.events(RESTORED)


def test_other_processes_restore_from_the_checkpoint(nodes, undisturbed):
    output = assert_ends_as(undisturbed, nodes, processes=2)
    assert "another value of: layout of the state, processes; resuming from the storage" in output
    assert f"resuming at step {SAVED}" in output

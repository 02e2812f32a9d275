"""Checkpoints that several processes verify together, which are threads of this one."""

import collections
import os
import pathlib
import threading

import numpy as np
import pytest
from connected import connected

from zaya_jax.checkpoint import damage_of, newest_step, require_step, shared_verification, verified_together
from zaya_jax.checkpoint.format.manifest import all_files, commit, sync_and_describe
from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.parallel.processes import coordination_service, hosts
from zaya_jax.parallel.processes.errors import CollectiveError

COUNT = 3
LARGE, SMALL = 50_000, 100


def make_step(run_folder: pathlib.Path, step: int) -> None:
    """Writes a step with three large files, as many small ones of weights, and one of training."""
    folder = run_folder / f"checkpoints/{step}"
    numbers = np.random.default_rng(step)
    sizes = {f"weights/{kind}{i}": size for i in range(3) for kind, size in (("d", LARGE), ("m", SMALL))}
    for name, size in (sizes | {"training/d": SMALL}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(numbers.bytes(size))
    commit(folder, step, sync_and_describe(folder, durable.list_files(folder)))


@pytest.fixture
def run_folder(tmp_path):
    for step in (4, 8):
        make_step(tmp_path, step)
    return tmp_path


@pytest.fixture
def together(monkeypatch):
    """Calls `verified_together` in all processes; returns their results and errors."""
    here = threading.local()
    monkeypatch.setattr(hosts, "_state", here)
    monkeypatch.setattr(coordination_service, "state", lambda: here)
    with connected(COUNT, fan_out=2) as peers:

        def run(exchanges, number, work):
            here.exchanges, here.hosts = exchanges, ("a", "b", "c")
            here.process_id, here.num_processes = number, COUNT
            return verified_together("test", work)

        yield lambda work: peers.on(range(COUNT), lambda *member: run(*member, work))


@pytest.fixture
def reads(monkeypatch):
    """Number of times that each file of a checkpoint was hashed."""
    counts = collections.Counter()
    content_hash = durable.content_hash

    def count(path):
        counts[path.name] += 1
        return content_hash(path)

    monkeypatch.setattr(durable, "content_hash", count)
    return counts


def test_each_file_is_read_by_one_process_and_large_ones_by_all(run_folder, together, reads, monkeypatch):
    shares, share_of = {}, shared_verification.damage_in_share

    def one_share(*arguments, index, **options):
        # Alone, so that what was hashed meanwhile is this share.
        with lock:
            before = reads.copy()
            damage = share_of(*arguments, index=index, **options)
            shares[index] = reads - before
        return damage

    lock = threading.Lock()
    monkeypatch.setattr(shared_verification, "damage_in_share", one_share)
    assert together(lambda verify: newest_step(run_folder, verify=verify)) == {0: 8, 1: None, 2: None}
    # All read the manifest, which lists the files.
    assert [share.pop("manifest.json") for share in shares.values()] == [1] * COUNT
    assert sum(shares.values(), collections.Counter()) == dict.fromkeys(
        ["d0", "d1", "d2", "m0", "m1", "m2", "d"], 1
    )
    assert all(len(share.keys() & {"d0", "d1", "d2"}) == 1 for share in shares.values())


def test_weights_alone_are_verified_for_another_run(run_folder, together, reads):
    (run_folder / "checkpoints/8/training/d").write_bytes(bytes(SMALL))
    results = together(lambda verify: require_step(run_folder, weights_only=True, verify=verify))
    assert results == {0: 8, 1: None, 2: None}
    assert len(reads) == 7  # with the manifest, and without the training state


@pytest.mark.parametrize("name", ["weights/d0", "weights/m1", "weights/d2", "training/d"])
def test_a_flipped_bit_is_found_whoever_reads_it(name, run_folder, together, caplog):
    path = run_folder / "checkpoints/8" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert together(lambda verify: newest_step(run_folder, verify=verify)) == {0: 4, 1: None, 2: None}
    (record,) = caplog.records
    assert record.getMessage().endswith(f"8 is damaged ({name} is not as it was written); using step 4")


def test_a_file_that_is_missing_or_no_file_is_found_before_bytes_are_read(run_folder, together, reads):
    folder = run_folder / "checkpoints/8"
    (folder / "weights/d0").unlink()
    os.mkfifo(run_folder / "checkpoints/4/weights/d0.more")  # reading it would block forever
    results = together(lambda verify: newest_step(run_folder, verify=verify))
    assert all(isinstance(each, CollectiveError) for each in results.values())
    assert "weights/d0 is missing" in str(results[0])
    assert "neither a file nor a folder" in str(results[0])
    assert not reads["d1"]


def test_the_results_are_those_of_one_process_for_converted_weights(tmp_path, together):
    """Their folder has checksums instead of a manifest."""
    for i in range(5):
        path = tmp_path / f"checkpoints/0/weights/d{i}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([i]))
    names = durable.list_files(tmp_path)
    durable.write_checksums(tmp_path, {name: durable.sha256_of_file(tmp_path / name) for name in names})
    assert together(lambda verify: require_step(tmp_path, verify=verify))[0] == 0
    path.write_bytes(b"x")
    results = together(lambda verify: require_step(tmp_path, verify=verify))
    damage = damage_of(tmp_path, 0)
    assert damage is not None
    assert all(damage in str(error) for error in results.values())


def test_an_error_of_process_0_is_raised_by_all_and_the_next_search_works(run_folder, together):
    def refuse(verify):
        assert verify(run_folder, 8, all_files) is None
        raise UserError("this folder is another run's")

    results = together(refuse)
    assert {str(each) for each in results.values()} == {"this folder is another run's"}
    assert [each.is_printed_here for each in results.values()] == [True, False, False]
    assert together(lambda verify: newest_step(run_folder, verify=verify))[0] == 8


def test_a_host_that_does_not_see_the_folder_is_named(run_folder, together, monkeypatch):
    """Its checkpoints are not damaged."""
    monkeypatch.setattr(
        shared_verification,
        "step_folder",
        lambda folder, step: pathlib.Path("/elsewhere" if hosts.process() == 2 else folder) / "checkpoints/8",
    )
    results = together(lambda verify: newest_step(run_folder, verify=verify))
    expected = (
        "process 2 on c: there is no /elsewhere/checkpoints/8 here, and process 0 has it; it must be on a "
        "file system that all hosts share"
    )
    assert [str(error) for error in results.values()] == [expected] * COUNT

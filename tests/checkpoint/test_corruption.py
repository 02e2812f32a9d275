"""How much damage to a checkpoint is detected: all of it with our manifest, a part of it by Orbax alone.

`pytest -s` prints the figures.
"""

import collections
import contextlib
import dataclasses
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from small_runs import small_config

from zaya_jax.checkpoint import Checkpoints, Retention, damage_of, newest_step
from zaya_jax.model.weights import abstract_variables

PAGE = 4096
STEP = "checkpoints/8"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> pathlib.Path:
    """Writes steps 4 and 8 of a small model, with random weights and two moments of each."""
    folder = tmp_path_factory.mktemp("run")
    with Checkpoints(folder, retention=Retention(newest=2)) as checkpoints:
        for step in (4, 8):
            checkpoints.save(step, **state_of(step, folder))
    return folder


def state_of(step: int, folder: pathlib.Path) -> dict[str, Any]:
    numbers = np.random.default_rng(step)
    shapes = abstract_variables(small_config(run_folder=folder, corpus=folder).model)
    weights, first, second = (
        jax.tree.map(lambda x: jax.device_put(numbers.normal(size=x.shape).astype(x.dtype)), shapes)
        for _ in range(3)
    )
    return {"weights": weights, "training": {"step": np.int32(step), "first": first, "second": second}}


def kind_of(name: str) -> str:
    """Returns a file's folder and name, with data files numbered."""
    parts = name.split("/")
    return "/".join([*parts[:-1], "*"]) if parts[-2:-1] == ["d"] else name


def files_of(folder: pathlib.Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def by_kind(folder: pathlib.Path) -> dict[str, list[str]]:
    kinds = collections.defaultdict(list)
    for name in files_of(folder):
        kinds[kind_of(name)].append(name)
    return kinds


@dataclasses.dataclass(frozen=True)
class Damage:
    """A file and its damaged content; None if it is removed."""

    name: str
    content: bytes | None


def flips(folder: pathlib.Path, names: list[str], count: int) -> Iterator[Damage]:
    """Yields flipped bits at random places of some files."""
    numbers = random.Random(" ".join(names))
    contents = {name: (folder / name).read_bytes() for name in names if (folder / name).stat().st_size}
    sizes = [len(content) for content in contents.values()]
    for name in numbers.choices(list(contents), sizes, k=count) if contents else ():
        content = bytearray(contents[name])
        content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
        yield Damage(name, bytes(content))


def without_pages(content: bytes) -> list[bytes]:
    starts = range(0, len(content), PAGE)
    return [content[:i] + bytes(len(content[i : i + PAGE])) + content[i + PAGE :] for i in starts]


def damages(folder: pathlib.Path, *, num_flips: int) -> dict[str, list[Damage]]:
    """Yields all kinds of damage to the files of a step, by kind.

    The older step is in the same folder. Data files have other names there; a stale file is any data file of
    the same folder.
    """
    kinds, older = by_kind(folder), by_kind(folder.with_name("4"))
    found: dict[str, list[Damage]] = {"flip": [], "truncate": [], "zero page": [], "swap": [], "stale": []}
    for kind, names in kinds.items():
        found["flip"] += flips(folder, names, num_flips)
        whole = {name: (folder / name).read_bytes() for name in names}
        stale = [(folder.with_name("4") / name).read_bytes() for name in older.get(kind, ())]
        for name, content in whole.items():
            others = [other for other in whole.values() if other != content]
            instead = {
                "truncate": [content[: len(content) // 2], content[:-1]],
                "zero page": without_pages(content),
                "swap": others,
                "stale": stale,
            }
            for what, contents in instead.items():
                found[what] += [Damage(name, each) for each in contents if each != content]
    names = files_of(folder)
    found["delete"] = [Damage(name, None) for name in names]
    found["add"] = [Damage(f"{name}.more", (folder / name).read_bytes()) for name in names]
    return found


@contextlib.contextmanager
def done_to(folder: pathlib.Path, damage: Damage) -> Iterator[None]:
    """Damages a file in place for a while, because copying the step would take too long."""
    path = folder / damage.name
    before = path.read_bytes() if path.exists() else None
    put(path, damage.content)
    yield
    put(path, before)


def put(path: pathlib.Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


def restored_by_orbax(folder: pathlib.Path, like: Any) -> Any:
    """Returns what Orbax alone restores of a step, as numpy; None if it raises an error."""
    items = {name: ocp.args.StandardRestore(tree) for name, tree in like.items()}
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(*like)) as reader:
            restored = reader.restore(folder, args=ocp.args.Composite(**items))
    except Exception:
        return None
    return jax.tree.map(np.asarray, dict(restored.items()))


@pytest.mark.campaign  # thousands of damaged copies, each of which is read
def test_all_damage_is_detected(run_folder):
    folder, counts = run_folder / STEP, {}
    for what, cases in damages(folder, num_flips=200).items():
        for damage in cases:
            with done_to(folder, damage):
                assert newest_step(run_folder) == 4, (what, damage.name)
        counts[what] = len(cases)
    assert damage_of(run_folder, 8) is None
    assert counts["flip"] >= 15 * 200
    assert min(counts.values()) >= 15
    print(f"\nof damages to a step, all seen: {counts}")


@pytest.mark.campaign  # a restore by Orbax for each
@pytest.mark.filterwarnings("ignore")  # Orbax warns in various ways about damaged files
def test_orbax_alone_detects_a_part(run_folder):
    """Shows why there is a manifest: if this fails some day, Orbax detects more than it did."""
    folder, counts = run_folder / STEP, {}
    like = jax.tree.map(abstract_on_device, state_of(8, run_folder))
    expected = restored_by_orbax(folder, like)
    assert expected is not None
    for what, cases in damages(folder, num_flips=10).items():
        found = collections.Counter(dict.fromkeys(("error", "wrong numbers", "no difference"), 0))
        for damage in cases:
            with done_to(folder, damage):
                restored = restored_by_orbax(folder, like)
            found[outcome(restored, expected)] += 1
        counts[what] = dict(found)
    for what, found in counts.items():
        print(f"\nOrbax alone, {what}: {found}", end="")
    # Data files have random names, so a stale file replaces another array, which is an error.
    assert counts["flip"]["wrong numbers"] + counts["zero page"]["wrong numbers"] > 0
    assert counts["flip"]["no difference"] > 0


def outcome(restored: Any, expected: Any) -> str:
    if restored is None:
        return "error"
    same = all(map(np.array_equal, jax.tree.leaves(restored), jax.tree.leaves(expected)))
    return "no difference" if same else "wrong numbers"


def abstract_on_device(array: Any) -> jax.ShapeDtypeStruct:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=device)

"""The bytes of a state on the host, and what a run must have in common with its copies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import small_values

from zaya_jax.config import Config
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.extensions import NO_EXTENSIONS
from zaya_jax.train.hooks.skipped_ranges import NO_SKIPPED_RANGES
from zaya_jax.train.peer_copies.host_state import copy_layout, own_parts, place_parts
from zaya_jax.train.peer_copies.identity import facts_of, run_identity
from zaya_jax.train.step.state import init_state, make_setup


def config_of(**sections) -> Config:
    values = small_values(run_folder="run", corpus="corpus")
    values["model"] |= {"num_hidden_layers": 1, "layer_pattern": ("hybrid",), "router": "linear"}
    for name, fields in sections.items():
        values.setdefault(name, {}).update(fields)
    return Config.from_dict(values)


def is_key(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def random_bits(array: jax.Array, numbers: np.random.Generator) -> np.ndarray:
    return np.frombuffer(numbers.bytes(array.nbytes), array.dtype).reshape(array.shape)


@pytest.fixture(scope="module")
def config() -> Config:
    return config_of(ema={"decay": 0.9}, execution={"dtype": "bfloat16"})


def test_a_state_is_placed_as_it_was_copied(config):
    state = jax.jit(lambda: init_state(config, make_setup(config)))()
    numbers = np.random.default_rng(0)
    # Not the zeros of a new state, and bit patterns of every kind, NaNs included.
    state = jax.tree.map(lambda x: x if is_key(x) else jax.device_put(random_bits(x, numbers)), state)
    layout = copy_layout(config, data_mesh(), NO_EXTENSIONS)
    parts = own_parts(state)
    content = b"".join(part.tobytes() for part in parts)
    assert layout.num_bytes == len(content)
    placed = place_parts(layout, memoryview(content))
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    for ours, theirs in zip(jax.tree.leaves(placed), jax.tree.leaves(state), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert b"".join(part.tobytes() for part in own_parts(placed)) == content


def test_the_layout_depends_on_the_arrays_alone(config):
    def fingerprint(config: Config) -> str:
        return copy_layout(config, data_mesh(), NO_EXTENSIONS).fingerprint

    expected = fingerprint(config)
    logged = dataclasses.replace(config, train=dataclasses.replace(config.train, log_every=3))
    assert fingerprint(logged) == expected
    assert fingerprint(config_of(execution={"dtype": "bfloat16"})) != expected


def test_facts_name_what_differs(config):
    def changed(config: Config, run: str = "a", skipped=NO_SKIPPED_RANGES) -> set[str]:
        facts = facts_of(config, run, "layout", skipped)
        return {name for name, value in facts.items() if value != expected[name]}

    expected = facts_of(config, "a", "layout", NO_SKIPPED_RANGES)
    faster = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, learning_rate=1.0))
    watched = dataclasses.replace(config, watch=dataclasses.replace(config.watch, min_seconds=600.0))
    assert changed(config) == changed(watched) == set()
    assert changed(faster) == {"config"}
    assert changed(config, run="b") == {"run"}
    assert changed(config, skipped=NO_SKIPPED_RANGES.with_range(3, 4)) == {"skipped batches"}


def test_a_copied_folder_is_another_run(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    assert run_identity(str(first), create=False) is None
    identity = run_identity(str(first), create=True)
    assert run_identity(str(first), create=True) == identity
    (second / "peer_copies.json").write_bytes((first / "peer_copies.json").read_bytes())
    other = run_identity(str(second), create=True)
    assert other is not None
    assert identity is not None
    assert (other.run, other.place != identity.place) == (identity.run, True)

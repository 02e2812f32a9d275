"""The simulated control plane: messages as real processes send them, and what grows with their number."""

import dataclasses
import functools

import pytest

from zaya_jax.bench.control.phases import (
    COMMIT,
    DEVICES,
    MERGE,
    PHASES,
    SAME,
    SERVICE,
    SHARED_PHASES,
    START,
    STOP,
    PhaseCost,
    described_files,
)
from zaya_jax.bench.control.simulation import Costs, Simulation
from zaya_jax.parallel.processes.tree.shape import FAN_OUT, place_of

COSTS = Costs(
    message=40e-6,
    per_byte=2e-9,
    latency=30e-6,
    register=150e-6,
    first_register=8e-3,
    start=4e-3,
    serve=200e-6,
    first_serve=300e-3,
    start_service=2e-3,
    connect=4e-3,
    describe=100e-6,
    first_describe=15e-3,
    file=5e-6,
    publish=10e-3,
    merge=500e-6,
    first_merge=5e-3,
)


@functools.cache
def simulated(count: int, names: tuple[str, ...] = PHASES, **options) -> dict[str, PhaseCost]:
    return Simulation(count, COSTS, **options).run(names)


@pytest.mark.parametrize("count", [2, 4, 16, 17, 64, 128])
def test_process_0_exchanges_a_message_each_way_with_each_child(count):
    children = min(count - 1, FAN_OUT)
    messages = {name: phase.messages for name, phase in simulated(count).items()}
    # A commit has three exchanges; a stop has one, after the request has come up and gone down.
    assert (messages[SAME], messages[COMMIT], messages[STOP]) == (
        2 * children,
        6 * children,
        3 * children + 1,
    )


@pytest.mark.parametrize("count", [128, pytest.param(8192, marks=pytest.mark.campaign)])
def test_the_work_of_process_0_grows_at_most_like_the_logarithm(count):
    few, many = simulated(32), simulated(count)
    assert many[START].messages == 3 * FAN_OUT
    for name in (SAME, STOP):
        assert many[name].messages == few[name].messages
        # Messages as short as those of two processes.
        assert many[name].num_bytes < 130 * many[name].messages
        assert many[name].cpu_seconds == pytest.approx(few[name].cpu_seconds, rel=0.01)
        # On their own cores, the time grows with the height of the tree.
        assert many[name].seconds < few[name].seconds * place_of(0, count).height


def test_a_star_would_make_process_0_handle_two_messages_per_process():
    star = simulated(128, (SAME,), fan_out=127)[SAME]
    assert star.messages == 2 * 127
    # Each of them waits for the others in process 0.
    assert star.seconds > 3 * simulated(128)[SAME].seconds


def test_only_what_the_documentation_says_grows_with_the_number_of_processes():
    """jax lists all devices, process 0 merges the indexes of all, and hosts and files have names."""
    few, many = simulated(64), simulated(128)
    # A child comes, sends the hosts of its subtree, and receives those of all.
    assert few[START].messages == many[START].messages == 3 * FAN_OUT
    grown = {name: many[name].cpu_seconds - few[name].cpu_seconds for name in PHASES}
    # Names of hosts come up once, and go down to each child.
    names = (FAN_OUT + 1) * 15 * COSTS.per_byte
    assert grown[START] == pytest.approx(names * 64, rel=0.01)
    assert grown[DEVICES] == pytest.approx(COSTS.describe * 64, rel=0.01)
    # The service connects each process by itself, and not in process 0.
    assert grown[SERVICE] == 0.0
    service = [each[SERVICE].service_cpu_seconds for each in (few, many)]
    assert service == [pytest.approx(COSTS.first_serve + COSTS.serve * count) for count in (64, 128)]
    assert grown[MERGE] == pytest.approx(COSTS.merge * 64, rel=0.01)
    manifest = COSTS.file * len(described_files(0)) * 64
    sent = COSTS.per_byte * (many[COMMIT].num_bytes - few[COMMIT].num_bytes)
    assert grown[COMMIT] == pytest.approx(manifest + sent, rel=0.01)


@pytest.mark.parametrize(
    ("few", "many", "writers"), [(64, 128, 32), pytest.param(1024, 8192, 256, marks=pytest.mark.campaign)]
)
def test_a_checkpoint_of_more_processes_costs_process_0_no_more_than_that_of_its_writers(few, many, writers):
    names = (COMMIT, MERGE)
    small, large = (simulated(count, names, writers=writers) for count in (few, many))
    for name in names:
        # Numbers of processes have a few more digits.
        assert large[name].num_bytes == pytest.approx(small[name].num_bytes, rel=0.01)
        assert large[name].cpu_seconds == pytest.approx(small[name].cpu_seconds, rel=0.001)
    assert small[MERGE].cpu_seconds == pytest.approx(COSTS.first_merge + writers * COSTS.merge)


def test_only_children_of_process_0_cost_it_their_start():
    """Three levels, and a star, in which all are its children."""
    start = Simulation(300, COSTS, fan_out=6).run((START,))[START]
    assert start.messages == 3 * 6
    star = Simulation(300, COSTS, fan_out=299).run((START,))[START]
    assert star.messages == 2 * 299
    assert start.cpu_seconds < star.cpu_seconds / 5


def test_processes_that_share_cores_take_longer():
    own, shared = (Simulation(64, COSTS, cores=cores).run() for cores in (None, 2))
    for name in SHARED_PHASES:
        assert (own[name].messages, own[name].num_bytes) == (shared[name].messages, shared[name].num_bytes)
        assert shared[name].seconds > own[name].seconds
    # 63 processes that each work for so long, on two cores.
    assert shared[START].seconds > 63 * COSTS.start / 2


def test_time_is_the_longest_chain_of_messages():
    """Process 0, and one other: a message there and one back."""
    free = dataclasses.replace(COSTS, per_byte=0.0)
    seconds = Simulation(2, free).run((SAME,))[SAME].seconds
    assert seconds == pytest.approx(2 * (2 * free.message + free.latency))

"""`zaya bench control`: its options and output, and the simulation against real processes (a campaign)."""

import dataclasses
import json

import pytest

from zaya_jax.bench.control.command import Row, check_memory, describe_costs, main, tables, to_json
from zaya_jax.bench.control.costs import measure_costs, measure_phases
from zaya_jax.bench.control.phases import COMMIT, PHASES, SAME, SERVICE, SHARED_PHASES, STOP, PhaseCost
from zaya_jax.bench.control.processes import summarize
from zaya_jax.bench.control.simulation import Costs, Simulation
from zaya_jax.errors import UserError

FACTOR = 4.0
"""How much the simulated time of a phase may differ from the measured one. The cores of the machine should be
idle otherwise; below `MIN_SECONDS` both are delays of the scheduler."""
MIN_SECONDS = 0.005


def test_options_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"--simulate is \[1\]; each number must be 2 or above"):
        main(["--simulate", "1"])
    with pytest.raises(UserError, match="rounds"):
        main(["--rounds", "0"])
    with pytest.raises(UserError, match=r"--processes is 100000000, which needs [\d.]+ GiB of memory"):
        check_memory(10**8)


def test_tables_have_all_phases():
    phases = {name: PhaseCost(0.25, 96, 1000, 0.004) for name in PHASES}
    rows = [Row(64, False, 2, phases), Row(64, True, 2, phases), Row(8192, True, None, phases)]
    times, work = tables(rows)
    names = ["64 measured, 2 cores", "64 simulated, 2 cores", "8,192 simulated, their own cores"]
    assert list(times.columns[0].cells) == names
    assert list(times.columns[1].cells) == ["250.0"] * 3
    names = ["processes", *PHASES]
    assert [column.header for column in times.columns] == names
    assert [column.header for column in work.columns] == [*names, "of service"]
    assert list(work.columns[0].cells) == ["64", "8,192 simulated"]
    assert list(work.columns[1].cells) == ["96, 4.0"] * 2
    costs = Costs(*[1e-6] * len(dataclasses.fields(Costs)))
    values = json.loads(json.dumps(to_json(costs, rows)))
    assert values["rows"][1]["phases"][STOP]["messages"] == 96
    assert "Process 0 registers a child in 1 us" in describe_costs(costs)


def test_a_phase_lasts_from_the_last_arrival_to_the_last_end():
    def record(begin: float) -> dict:
        return {
            "spans": {name: [(begin, 5.0 + begin), (10.0 + begin, 12.0)] for name in SHARED_PHASES},
            "work": {name: [(32, 100, 0.5), (34, 100, 0.7)] for name in SHARED_PHASES},
            "start_cpu": (0.1, 0.2),
            "service_cpu": 0.4,
            "memory_bytes": 9,
            "messages": None,
        }

    phases = summarize([record(0.0), record(1.0), record(0.5)])["phases"]
    # Visits last 5 s and 1 s.
    work = {"messages": 33, "num_bytes": 100, "cpu_seconds": 0.6}
    assert phases[SAME] == {"seconds": 3.0, **work, "service_cpu_seconds": 0.0}
    assert phases[SERVICE] == {"seconds": 3.0, **work, "service_cpu_seconds": 0.4}
    # A stop begins in the last process, which requests it: 5.5 s and 1.5 s.
    assert phases[STOP]["seconds"] == 3.5


@pytest.mark.slow
def test_four_real_processes_exchange_what_the_simulation_says(tmp_path):
    actual = measure_phases(4, tmp_path, rounds=1)
    simulated = Simulation(4, Costs(*[1e-5] * len(dataclasses.fields(Costs)))).run()
    for name in PHASES:
        assert (actual[name].messages, actual[name].num_bytes) == (
            simulated[name].messages,
            simulated[name].num_bytes,
        )
        assert actual[name].cpu_seconds > 0
        assert (actual[name].service_cpu_seconds > 0) == (name == SERVICE)


@pytest.mark.campaign
def test_the_simulation_agrees_with_4_16_and_64_processes(tmp_path):
    """pytest -n 0 -s -m campaign tests/bench/control"""
    costs = measure_costs(tmp_path, rounds=3)
    print(describe_costs(costs))
    for count in (4, 16, 64):
        actual = measure_phases(count, tmp_path, rounds=5)
        simulated = Simulation(count, costs, cores=2).run()
        for name in PHASES:
            ours, real = simulated[name], actual[name]
            print(count, name, f"{1e3 * ours.seconds:.1f} and {1e3 * real.seconds:.1f} ms")
            if name in (SAME, STOP, COMMIT):
                assert (ours.messages, ours.num_bytes) == (real.messages, real.num_bytes), name
            # A start of more than a second has reports of what is missing, too.
            assert ours.messages <= real.messages < 2 * max(1, ours.messages), name
            if real.seconds > MIN_SECONDS:
                assert real.seconds / FACTOR < ours.seconds < real.seconds * FACTOR, name

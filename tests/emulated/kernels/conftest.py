"""The tests of `tests/kernels` on gfx942 machine code: each launch is compiled for MI300X and emulated.

They are skipped without the ROCm compiler (`zaya plan rocm-wheels`) or the packages of the extra `emulator`.
Compiled launches are kept on disk between runs. `-m "campaign or not campaign"` runs all cases; without it,
each test runs its first cases only, which include both dtypes.
"""

import collections
import functools
import importlib.util
import pathlib
import sys

import pytest

from zaya_jax.plan.rocm.wheels import find_plugin

FOLDER = pathlib.Path(__file__).parent
sys.path.append(str(FOLDER.parents[1] / "kernels"))
NUM_FAST_CASES = 2
"""Cases of each test in the fast subset: kernel tests alternate dtypes, so that two cases have both."""

EXECUTED = "executed"
"""Name of a test's property: numbers of launches and of instructions by name."""


@functools.cache
def why_not() -> str | None:
    """Returns why kernels cannot be executed here; None if they can."""
    missing = [name for name in ("tinygrad", "flatbuffers") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: pip install -e '.[emulator]'"
    try:
        find_plugin()
    except ValueError as error:
        return str(error)
    return None


@functools.cache
def executor():
    """Returns one executor for all tests of this process, because jax traces functions again for another
    one.
    """
    from zaya_jax.plan.rocm.launches.compiler import LaunchCompiler
    from zaya_jax.plan.rocm.launches.execution import EmulatedLaunches

    return EmulatedLaunches(LaunchCompiler())


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items):
    """Marks all but the first cases of each test as campaign."""
    numbers = collections.Counter()
    for item in items:
        if item.path.parent == FOLDER:
            test = item.path, getattr(item, "originalname", item.name)
            numbers[test] += 1
            is_slow = "any_shape" in item.name or "same_in_every_run" in item.name
            if numbers[test] > NUM_FAST_CASES or is_slow:
                item.add_marker(pytest.mark.campaign)
            parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
            if any(isinstance(value, str) and value == "xla" for value in parameters):
                item.add_marker(pytest.mark.skip("XLA's form launches no kernel"))


def pytest_runtest_setup(item):
    if reason := why_not():
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Runs a test with the executor, and fails if it launches nothing, because it would prove nothing."""
    with executor().launches():
        result = yield
    executed = executor().executed
    assert executed, "the test executed no kernel"
    total = collections.Counter()
    for launch in executed:
        total.update(launch.execution.counts.instructions)
    # Properties reach the reports also from worker processes.
    item.user_properties.append((EXECUTED, {"launches": len(executed), "instructions": dict(total)}))
    return result


def pytest_terminal_summary(terminalreporter):
    """Prints how much all tests have executed."""
    reports = [report for each in terminalreporter.stats.values() for report in each]
    executed = [
        value
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == EXECUTED
    ]
    total = collections.Counter()
    for each in executed:
        total.update(each["instructions"])
    terminalreporter.write_line(
        f"emulated: {len(executed)} tests, {sum(each['launches'] for each in executed):,} launches, "
        f"{total.total():,} instructions of waves, {len(total)} distinct ones"
    )

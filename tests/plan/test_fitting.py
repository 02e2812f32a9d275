"""Whether a run fits, and suggested changes: each is verified with the arithmetic of `zaya plan`."""

import io
import re
import shlex
import types

import pytest
from rich.console import Console

from zaya_jax.options import load_config
from zaya_jax.plan import fitting
from zaya_jax.plan.dry_run import print_dry_run
from zaya_jax.plan.fitting import MemoryBudget, describe_fit, local_budget, planned_budget
from zaya_jax.plan.memory import memory_by_kind
from zaya_jax.plan.shares import for_platform

GIB = 2**30
TINY = "configs/tiny.py"


def needed(config, num_devices):
    return {p.name: sum(memory_by_kind(p.config, num_devices).values()) for p in config.resolved_phases}


def said_of(config, num_devices, size):
    return describe_fit(
        config, num_devices, MemoryBudget("one test", "cpu", size), needed(config, num_devices)
    )


def test_the_largest_preset_says_that_it_does_not_fit_and_what_would():
    """As in `zaya plan`: 206.52 GiB of an MI300X's 178.81."""
    config = load_config("configs/zaya1_8b.py", [])
    console = Console(file=io.StringIO(), width=120)
    print_dry_run(config, devices=128, console=console)
    printed = " ".join(console.file.getvalue().split())
    assert planned_budget().size == 192 * 10**9
    assert (
        "by arithmetic it does not fit on 128 devices: phase finetune needs 206.52 GiB of the 178.81 GiB"
        in printed
    )
    config = for_platform(config, "rocm")
    better = load_config("configs/zaya1_8b.py", re.findall(r"--config\.\S+=\d+", printed))
    better = for_platform(better, "rocm")
    assert max(needed(better, 128).values()) < 192 * 10**9 < max(needed(config, 128).values())
    (more,) = re.findall(r"on (\d+) devices \(", printed)
    assert max(needed(config, int(more)).values()) < 192 * 10**9


@pytest.mark.parametrize("share", [0.95, 0.7, 0.6, 0.5])
def test_suggested_options_fit(share):
    """Applies the options of the sentence to the same config."""
    config = load_config(TINY, [])
    size = int(share * needed(config, 1)[""])
    printed = said_of(config, 1, size)
    assert "does not fit on 1 device: it needs" in printed
    options, devices = re.search(r"fits with (.*?) \(", printed), re.search(r"on (\d+) devices \(", printed)
    assert options or devices
    if options:
        assert needed(load_config(TINY, shlex.split(options[1])), 1)[""] <= size
    if devices:
        assert needed(config, int(devices[1]))[""] <= size


def test_a_config_that_nothing_helps_is_reported():
    assert said_of(load_config(TINY, []), 1, 1000).endswith(
        "neither more microbatches nor more devices are enough"
    )


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_config_that_fits_has_no_advice(count):
    printed = said_of(load_config(TINY, []), count, GIB)
    assert printed.startswith(f"by arithmetic it fits on {count} device")
    assert "--config" not in printed


def test_a_dry_run_of_this_machine_has_this_machines_memory(monkeypatch):
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**18}
    monkeypatch.setattr(fitting, "os", types.SimpleNamespace(sysconf=sizes.get))
    monkeypatch.setattr(fitting.jax, "local_device_count", lambda: 4)
    assert local_budget() == MemoryBudget("a device of this machine", "cpu", GIB // 4)

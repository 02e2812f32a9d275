"""Tables of modelled times and of GPUs for a terminal of 80 columns."""

from collections.abc import Callable, Sequence

from rich.table import Table

from zaya_jax.plan.compiled.step_time import HOP_SECONDS, LINKS_REACHED, NETWORK_REACHED, StepTime
from zaya_jax.plan.gpus import DEVICES
from zaya_jax.plan.output.plan import CompiledStep, Plan
from zaya_jax.text_tables import format_bytes, name_column, number_column


def times_table(times: Sequence[StepTime], plan: Plan) -> Table:
    """Modelled time of a compiled step by kind of work, and derived figures."""
    columns = [number_column(f"products at\n{time.share:.0%} of peak") for time in times]
    title = "modelled time of the compiled step, ms; not measured on hardware"
    table = Table(name_column("kind of work"), *columns, title=title, caption=_ASSUMED)

    def add(what: str, text_of: Callable[[StepTime], str], style: str | None = None) -> None:
        table.add_row(what, *map(text_of, times), style=style)

    works = times[0].works if times else {}
    for name in sorted(works, key=lambda name: -works[name].seconds):
        add(name, lambda time, name=name: milliseconds(time.works[name].seconds))
    add("exposed communication", lambda time: milliseconds(time.exposed_seconds))
    add("  between nodes", lambda time: milliseconds(time.between_nodes_seconds))
    add("step", lambda time: milliseconds(time.seconds), style="bold")
    add("overlapped communication", lambda time: milliseconds(time.hidden_seconds))
    add("tokens/s per GPU", lambda time: f"{plan.tokens / time.seconds / plan.num_gpus:,.0f}")
    add(f"days of {plan.num_steps:,} steps", lambda time: f"{_days(time, plan):,.3g}")
    add("  thousand GPU hours", lambda time: f"{_days(time, plan) * 24 * plan.num_gpus / 1e3:,.4g}")
    add(
        f"  MWh of GPUs at {plan.watts:,.0f} W",
        lambda time: f"{_days(time, plan) * 24 * plan.num_gpus * plan.watts / 1e6:,.4g}",
    )
    return table


_ASSUMED = (
    "each kernel takes the longer of its products at that share of the data-sheet peak and its bytes at the "
    f"memory bandwidth; links reach {LINKS_REACHED:.0%} and NICs {NETWORK_REACHED:.0%} of their data sheet, "
    f"with {1e6 * HOP_SECONDS:.0f} us per hop, unless --measured has figures; one collective at a time; for "
    "the cost of failures see zaya plan failures"
)


def _days(time: StepTime, plan: Plan) -> float:
    return time.seconds * plan.num_steps / 86_400


def milliseconds(seconds: float) -> str:
    """Formats seconds in milliseconds with `figure`."""
    return figure(1e3 * seconds)


def verdict_by_arithmetic(plan: Plan) -> str:
    """Returns a sentence on whether a step fits, and which resource limits it."""
    memory = sum(plan.memory.values())
    fits = "fits" if memory <= plan.device_memory else "does not fit"
    sizes = f"{format_bytes(memory)} of {format_bytes(plan.device_memory)}"
    bound = f"at least {milliseconds(plan.bounds[plan.bound])} ms for the {plan.bound}"
    return f"by arithmetic it {fits}: {sizes}; a step takes {bound}; --compile models the step"


def verdict(step: CompiledStep, plan: Plan) -> str:
    """Returns a sentence on whether a compiled step fits, and what takes most of its time."""
    memory, time = step.memory.total, step.times[0]
    sizes = f"{format_bytes(memory)} of {format_bytes(plan.device_memory)}"
    seconds = {name: work.seconds for name, work in time.works.items()}
    seconds["waiting for communication"] = time.exposed_seconds
    most = sorted(seconds, key=lambda name: -seconds[name])[:2]
    shares = ", ".join(f"{name} ({seconds[name] / time.seconds:.0%})" for name in most)
    fits = "fits" if memory <= plan.device_memory else "does not fit"
    modelled = f"by the model {milliseconds(time.seconds)} ms at {time.share:.0%} of peak"
    return f"{fits}: {sizes}; {modelled}, most of it {shares}"


def devices_table() -> Table:
    """The GPUs that a plan can be made for, one per row."""
    columns = map(number_column, ("HBM\nGB", "bf16\nTFLOP/s", "HBM\nTB/s", "link\nGB/s", "NIC\nGB/s", "W"))
    title = "GPUs; none of these figures was measured by this project"
    table = Table(name_column("GPU"), *columns, name_column("source"), title=title)
    for device in DEVICES.values():
        figures = (
            device.memory_bytes / 1e9,
            device.matrix_flops / 1e12,
            device.memory_bandwidth / 1e12,
            device.link_bandwidth / 1e9,
            device.network_bandwidth / 1e9,
            device.watts,
        )
        table.add_row(device.name, *(f"{figure:,.4g}" for figure in figures), device.sources)
    return table


def figure(value: float) -> str:
    """Formats with one decimal from 100 on, and with three significant digits below, so that small values are
    not 0.
    """
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"

"""Tables of modelled times and of GPUs for a terminal of 80 columns."""

from collections.abc import Callable, Mapping

from rich.table import Table

from zaya_jax.plan.cases import OPTIMISTIC, PESSIMISTIC, PUBLISHED, TimeRange
from zaya_jax.plan.compiled.step_time import StepTime
from zaya_jax.plan.gpus import DEVICES
from zaya_jax.plan.output.plan import CompiledStep, Plan
from zaya_jax.text_tables import format_bytes, name_column, number_column


def times_table(times: Mapping[str, StepTime], plan: Plan) -> Table:
    """Modelled time of a compiled step by kind of work and by collective, and derived figures."""
    columns = [number_column(f"{name},\n{time.share:.0%} of peak") for name, time in times.items()]
    title = "modelled time of the compiled step, ms; not measured on hardware"
    table = Table(name_column("kind of work"), *columns, title=title, caption=_ASSUMED)

    def add(what: str, text_of: Callable[[StepTime], str], style: str | None = None) -> None:
        table.add_row(what, *map(text_of, times.values()), style=style)

    works = times[PUBLISHED.name].works
    for name in sorted(works, key=lambda name: -works[name].seconds):
        add(name, lambda time, name=name: milliseconds(time.works[name].seconds))
    add("exposed communication", lambda time: milliseconds(time.exposed_seconds))
    exposed = times[PUBLISHED.name].exposed
    for name in sorted(exposed, key=lambda name: -exposed[name]):
        add(f"  {name}", lambda time, name=name: milliseconds(time.exposed.get(name, 0.0)))
    add("  all between nodes", lambda time: milliseconds(time.between_nodes_seconds))
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
    "each kernel takes the longer of its products, at that share of the data-sheet peak for their operands' "
    "type, and its bytes at the memory bandwidth; collectives in a node and between nodes overlap if they "
    "have different streams, others run one at a time. published: all-reduces of one and two nodes of MI300X "
    "with CX-7 NICs, all-to-alls at the rate that AMD's validation suite expects, "
    f"{1e6 * PUBLISHED.network_step_seconds:.3g} us for each further node of a ring. optimistic: two nodes "
    "with Pollara NICs, all-to-alls as fast as rings, "
    f"{1e6 * OPTIMISTIC.network_step_seconds:.3g} us. pessimistic: the slowest cluster that AMD's suite "
    "accepts, always one collective at a time, all-to-alls "
    f"{PESSIMISTIC.all_to_all_slowdown:.3g} times as long as rings, "
    f"{1e6 * PESSIMISTIC.network_step_seconds:.3g} us, products in our kernels at "
    f"{PESSIMISTIC.kernel_rate:.0%} of the library's rate. --measured replaces published times by yours; for "
    "the cost of failures see zaya plan failures"
)


def effects_table(times: TimeRange) -> Table:
    """Time of the published case if one assumption changes."""
    columns = map(number_column, (OPTIMISTIC.name, PESSIMISTIC.name))
    title = f"step of {milliseconds(times.seconds[PUBLISHED.name])} ms with one other assumption, ms"
    table = Table(name_column("assumption"), *columns, title=title)
    for name, (fast, slow) in sorted(times.effects.items(), key=lambda item: item[1][0] - item[1][1]):
        table.add_row(name, milliseconds(fast), milliseconds(slow))
    return table


def summary(plan: Plan, step: CompiledStep | None = None) -> str:
    """Returns the line of a plan to quote: time and rate of a step, their range, and what decides them."""
    times = plan.in_turn if step is None else step.step_range
    fast, quoted, slow = (times.seconds[case.name] for case in (OPTIMISTIC, PUBLISHED, PESSIMISTIC))
    rates = [plan.tokens / seconds / plan.num_gpus for seconds in (quoted, slow, fast)]
    days = [seconds * plan.num_steps / 86_400 for seconds in (quoted, fast, slow)]
    method = "modelled from the compiled step" if step else "by arithmetic without overlap"
    cluster = f"{plan.nodes:,} x {plan.gpus_per_node} {plan.device}"
    shares = (f"{case.product_share:.0%}" for case in (PUBLISHED, PESSIMISTIC, OPTIMISTIC))
    products = "products at {} of the peak ({} to {})".format(*shares)
    measured = f"{' and '.join(plan.measured)} as measured" if plan.measured else "nothing measured"
    return (
        f"{plan.run} on {cluster}: {milliseconds(quoted)} ms per step "
        f"({milliseconds(fast)} to {milliseconds(slow)}), "
        f"{rates[0]:,.0f} tokens/s per GPU ({rates[1]:,.0f} to {rates[2]:,.0f}), "
        f"{days[0]:,.3g} days for {plan.num_steps:,} steps ({days[1]:,.3g} to {days[2]:,.3g}); {method} "
        f"with {products}, from published figures, {measured}; most uncertain: {times.main_assumption}"
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
    memory, time = step.memory.total, step.times[PUBLISHED.name]
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
    columns = map(
        number_column,
        ("HBM\nGB", "bf16\nTFLOP/s", "float32\nTFLOP/s", "HBM\nTB/s", "link\nGB/s", "NIC\nGB/s", "W"),
    )
    title = "GPUs; none of these figures was measured by this project"
    table = Table(name_column("GPU"), *columns, name_column("source"), title=title)
    for device in DEVICES.values():
        figures = (
            device.memory_bytes / 1e9,
            device.matrix_flops / 1e12,
            device.float32_flops / 1e12,
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

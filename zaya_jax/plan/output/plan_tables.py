"""A plan as tables for a terminal of 80 columns."""

from collections.abc import Callable, Iterator, Mapping

from rich.table import Table

from zaya_jax.plan.cases import CASES, PUBLISHED
from zaya_jax.plan.compiled.search import SearchResult
from zaya_jax.plan.integrity_costs import IntegrityCost
from zaya_jax.plan.output.plan import CompiledStep, Plan
from zaya_jax.plan.output.time_tables import effects_table, figure, milliseconds, times_table
from zaya_jax.text_tables import format_bytes, memory_table, name_column, number_column


def plan_tables(plan: Plan) -> Iterator[Table]:
    """Tables of the arithmetic of a run."""
    yield _run(plan)
    yield _operations(plan)
    yield _memory(plan)
    yield _peer_copies(plan)
    yield _policies(plan)
    yield _seconds(plan)
    yield _integrity(plan)
    yield _gemms(plan)


def compiled_tables(step: CompiledStep, plan: Plan) -> Iterator[Table]:
    """Tables of the compiled step."""
    yield _compiled_memory(step, plan)
    yield times_table(step.times, plan)
    yield effects_table(step.step_range)
    yield _collectives(step)
    yield _buffers(step)
    yield _kernels(step)


def kernels_table(steps: Mapping[str, CompiledStep], plan: Plan) -> Table:
    """A step compiled in several ways, side by side."""
    rows = f"{plan.micro_batch:,} x {plan.own_tokens:,}"
    title = f"the step, {rows} tokens at a time, without and with Pallas kernels"
    table = Table(name_column("a GPU"), *map(number_column, steps), title=title)

    def add(what: str, text_of: Callable[[CompiledStep], str]) -> None:
        table.add_row(what, *map(text_of, steps.values()))

    add("arguments", lambda step: format_bytes(step.memory.arguments))
    add("temporaries", lambda step: format_bytes(step.memory.temporaries))
    add("total memory", lambda step: format_bytes(step.memory.total))
    add("GB moved per step: operands and results of all kernels", lambda step: figure(step.moved_bytes / 1e9))
    # The scopes are the same for all steps.
    for scope in next(iter(steps.values())).moved_bytes_by_scope:
        add(f"  {scope}", lambda step, scope=scope: figure(step.moved_bytes_by_scope[scope] / 1e9))
    add("kernels made by XLA", lambda step: f"{step.num_kernels:,}")
    add("  that spill, or take scratch or too much LDS", lambda step: f"{len(step.problems):,}")
    for case in CASES:
        add(
            f"ms per step, modelled, {case.name} case",
            lambda step, name=case.name: milliseconds(step.times[name].seconds),
        )
    add("s to compile", lambda step: f"{step.compile_seconds:.0f}")
    return table


def found_table(result: SearchResult, plan: Plan) -> Table:
    """The steps that a search compiled, which of them fit, and the best ones."""
    columns = map(number_column, ("sequences", "GPUs", "memory"))
    table = Table(name_column("remat"), *columns, "fits", title="compiled by the search")
    limit = plan.device_memory
    for trial in result.trials:
        fits = "yes" if trial.num_bytes <= limit else "no"
        shares = f"{trial.micro_batch:,}", f"{trial.context_devices:,}"
        table.add_row(trial.remat, *shares, format_bytes(trial.num_bytes), fits)
    cheapest = result.cheapest_remat or "none of them fits"
    own = f"{plan.context_gpus:,}"
    table.add_row("cheapest", f"{plan.micro_batch:,}", own, "", cheapest, style="bold")
    for remat, seconds in result.seconds.items():
        style = "bold" if remat == result.fastest_remat else None
        named = "fastest, by the model" if style else ""
        table.add_row(remat, f"{plan.micro_batch:,}", own, f"{milliseconds(seconds)} ms", named, style=style)
    largest = f"{result.largest_micro_batch:,}" if result.largest_micro_batch else "not even one fits"
    table.add_row("largest", largest, own, "", result.largest_remat, style="bold")
    for shared in result.sharings:
        size, fits = format_bytes(shared.num_bytes), "yes" if shared.num_bytes <= limit else "no"
        time = "" if shared.seconds is None else f", {milliseconds(shared.seconds)} ms"
        name = f"experts on {shared.node_devices:,} GPU" + "s" * (shared.node_devices > 1)
        table.add_row(name, f"{plan.micro_batch:,}", own, size, fits + time)
    fewest = f"{result.fewest_context_devices:,}" if result.fewest_context_devices else "none"
    table.add_row("fewest", "1", fewest, "", result.largest_remat, style="bold")
    return table


def _run(plan: Plan) -> Table:
    title = f"{plan.run} on {plan.nodes:,} x {plan.gpus_per_node} {plan.device}"
    table = Table(name_column("quantity"), name_column("value"), title=title)
    data, bound = plan.data, plan.bounds[plan.bound]
    table.add_row("parameters", f"{plan.parameters:,}")
    table.add_row("active per token, without embedding", f"{plan.active_parameters:,}")
    table.add_row("tokens per step", f"{plan.batch_size:,} x {plan.sequence_length:,} = {plan.tokens:,}")
    table.add_row("sequences per GPU at a time", f"{plan.micro_batch:,}")
    if plan.context_gpus > 1:
        table.add_row("GPUs that share a sequence", f"{plan.context_gpus:,}: {plan.own_tokens:,} tokens each")
    table.add_row("data per step, 4 bytes per token", f"{data.pages:,.0f} pages of 4 KiB")
    table.add_row("shortest step for storage of 70,000 IOPS", f"{data.shortest_step:.3g} s")
    table.add_row("  if a page costs 8 reads", f"{data.shortest_step_scattered:.3g} s")
    table.add_row("  IOPS at the lower bound of the step", f"{data.iops(bound):,.0f}")
    return table


def _operations(plan: Plan) -> Table:
    work = plan.operations
    columns = map(number_column, ("forward, per token", "share"))
    table = Table(name_column("FLOPs"), *columns, title="operations")
    total = sum(work.forward.values())
    for part, flops in work.forward.items():
        table.add_row(part, f"{flops:.4g}", f"{flops / total:.1%}")
    table.add_row("forward and backward", f"{work.training:.4g}", "")
    table.add_row(f'recomputed, remat "{plan.remat}"', f"{work.recomputed:.4g}", "")
    table.add_row("", "per GPU and step", "")
    # FLOPs of one GPU, to compare with its optimizer work.
    step = (work.training + work.recomputed) * plan.tokens / plan.num_gpus
    table.add_row("network", f"{step:.4g}", f"{step / (step + work.optimizer):.1%}")
    table.add_row("optimizer", f"{work.optimizer:.4g}", f"{work.optimizer / (step + work.optimizer):.1%}")
    if work.optimizer:
        ratio = work.optimizer_replicated / work.optimizer
        table.add_row("  if each GPU did all matrices", f"{work.optimizer_replicated:.4g}", f"{ratio:,.0f} x")
    return table


def _memory(plan: Plan) -> Table:
    return memory_table("memory per GPU, by arithmetic", plan.memory, plan.device_memory, title="memory")


def _peer_copies(plan: Plan) -> Table:
    """Host memory and time of copies of the state, whether the run makes them or not."""
    cost = plan.peer_copies
    how = "off" if cost.every is None else f"every {cost.every:,} steps"
    title = f"copies of the state in the memory of nodes, train.peer_copies_every: {how}"
    table = Table(name_column("peer copies"), number_column("value"), title=title)
    table.add_row("a GPU copies", format_bytes(cost.gpu_bytes))
    table.add_row("memory of a node: two steps of this and of another node", format_bytes(cost.node_bytes))
    table.add_row("  more while it copies", format_bytes(cost.buffer_bytes))
    table.add_row("ms to the host, over PCIe 5.0; training waits", milliseconds(cost.host_seconds))
    table.add_row("ms to another node, over its NICs; in the background", milliseconds(cost.network_seconds))
    return table


def _policies(plan: Plan) -> Table:
    title = f"activations kept for {plan.micro_batch:,} x {plan.own_tokens:,} tokens"
    table = Table(name_column("remat"), *map(number_column, ("activations", "recomputed")), title=title)
    for name, policy in plan.policies.items():
        table.add_row(
            name, format_bytes(policy.activations), f"{policy.recomputed / plan.operations.training:.1%}"
        )
    return table


def _seconds(plan: Plan) -> Table:
    links = plan.communication
    title = (
        f"time of a step; padded: {figure(links.reduced_bytes / 1e9)} GB of gradients reduce-scattered "
        f"in {links.reduced_dtype}, {figure(links.gathered_bytes / 1e9)} GB of weights all-gathered"
    )
    columns = name_column("resource of a GPU"), number_column("bound, ms"), number_column("estimate, ms")
    if links.expert_bytes:
        title += f"; {figure(links.expert_bytes / 1e9)} GB of experts and their gradients within each node"
    if plan.context_gpus > 1:
        shared = links.shared
        title += (
            f"; for shared sequences {figure(shared.keys / 1e9)} GB of keys and values, "
            f"{figure(shared.gradients / 1e9)} of their gradients, {figure(shared.halos / 1e9)} of halos"
        )
    table = Table(*columns, title=title, caption=_REASONS)
    for resource, seconds in plan.estimates.items():
        name = f"{resource}, as measured" if resource in plan.measured else resource
        table.add_row(name, milliseconds(plan.bounds[resource]), milliseconds(seconds))
    lower, in_turn = plan.bounds[plan.bound], plan.seconds_in_turn
    table.add_row(f"no step is shorter: {plan.bound}", milliseconds(lower), "", style="bold")
    table.add_row("one after the other", "", milliseconds(in_turn), style="bold")
    most, rate = (plan.tokens / seconds / plan.num_gpus for seconds in (lower, in_turn))
    table.add_row("tokens/s per GPU", f"at most {most:,.0f}", f"{rate:,.0f}")
    return table


_REASONS = (
    "bound: minimum of any step, each resource at its rate in `zaya plan devices`. It counts products with "
    "one expert per token; weights, gradients, state and kept activations through memory (the compiled step "
    "of the 8B preset moves about four times as much); each weight and gradient without padding, to a GPU "
    f"over its links, to a node over its NICs. estimate: products at {PUBLISHED.product_share:.0%} of the "
    "peak, messages with padding in the time of published collectives, memory as in its bound, no overlap; a "
    "real step can be shorter or longer"
)


def _integrity(plan: Plan) -> Table:
    """Costs of the checks for silent corruption, next to the estimate of the step without them."""
    columns = (f"{each.field}\n{'on' if each.is_enabled else 'off'}" for each in plan.integrity)
    title = "checks for silent corruption, of what each GPU owns"
    table = Table(name_column("a GPU"), *map(number_column, columns), title=title, caption=_CHECKS)

    def add(what: str, text_of: Callable[[IntegrityCost], str]) -> None:
        table.add_row(what, *map(text_of, plan.integrity))

    add("read per step", lambda cost: format_bytes(cost.read_bytes))
    add("ms per step", lambda cost: milliseconds(cost.seconds))
    add("share of the estimated step", lambda cost: f"{cost.seconds / plan.seconds_in_turn:.2%}")
    add("memory", lambda cost: format_bytes(cost.memory))
    add("more memory while a step is repeated", lambda cost: format_bytes(cost.peak))
    add("ms of a repetition", lambda cost: milliseconds(cost.repetition_seconds))
    return table


_CHECKS = (
    "bytes at the memory bandwidth, and one all-reduce; launches of kernels are not counted. watch.replay is "
    "in addition to watch.checksums, which it requires. A repetition on other devices also compiles the step"
)


def _gemms(plan: Plan) -> Table:
    saturating = plan.saturating_flops
    title = "products"
    if saturating is not None:
        title += f", and their share of the {saturating / 1e9:.0f} GFLOP that the peak needs"
    table = Table(name_column("product"), *map(number_column, ("size", "GFLOP", "share")), title=title)
    for gemm in plan.gemms:
        size = f"{gemm.rows:,} x {gemm.depth:,} x {gemm.columns:,}"
        size = f"{gemm.count:,} of {size}" if gemm.count > 1 else size
        table.add_row(
            gemm.name, size, figure(gemm.flops / 1e9), f"{gemm.flops / saturating:.0%}" if saturating else ""
        )
    return table


def _compiled_memory(step: CompiledStep, plan: Plan) -> Table:
    memory = step.memory
    table = Table(
        name_column("memory per GPU, compiled"),
        number_column("value"),
        title=f"compiled in {step.compile_seconds:.0f} s by XLA for {plan.device}",
    )
    table.add_row("arguments: state and batch", format_bytes(memory.arguments))
    table.add_row("outputs that do not alias arguments", format_bytes(memory.outputs - memory.aliased))
    table.add_row("temporaries", format_bytes(memory.temporaries))
    verdict = "fits" if memory.total <= plan.device_memory else "does not fit"
    total = f"{format_bytes(memory.total)} of {format_bytes(plan.device_memory)}: {verdict}"
    table.add_row("sum", total, style="bold")
    table.add_row("FLOPs of products per GPU, without Pallas kernels", f"{step.flops:.4g}")
    for scope, flops in step.flops_by_scope.items():
        table.add_row(f"  {scope}", f"{flops:.4g}")
    table.add_row("GB its kernels read and write", figure(step.moved_bytes / 1e9))
    return table


def _collectives(step: CompiledStep) -> Table:
    columns = ("count", "GB", "largest\narray, MB", "GFLOP\noverlapped", "kernels\noverlapped")
    table = Table(name_column("collective"), *map(number_column, columns))
    for kind, result in step.collectives.items():
        table.add_row(
            f"{kind}\n  of {', '.join(result.dtypes)}",
            f"{result.count:,}",
            figure(result.num_bytes / 1e9),
            figure(result.largest_bytes / 1e6),
            f"{result.overlapped_flops / 1e9:,.0f}",
            f"{result.overlapped_kernels:,}",
        )
    return table


def _buffers(step: CompiledStep) -> Table:
    table = Table(number_column("largest buffers"), name_column("values in it"))
    for size, values in step.buffers:
        table.add_row(format_bytes(size), values)
    return table


def _kernels(step: CompiledStep) -> Table:
    title = f"{step.num_kernels:,} kernels made by XLA"
    table = Table(name_column("kernel"), name_column("problems"), title=title)
    for name, problems in step.problems.items():
        table.add_row(name, "; ".join(problems))
    if not step.problems:
        table.add_row("all", "no spills, no scratch, LDS within the limit")
    return table

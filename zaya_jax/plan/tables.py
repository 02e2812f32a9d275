"""A plan as tables that fit a terminal of 80 columns."""

from collections.abc import Callable, Iterator, Mapping

from rich.table import Table

from zaya_jax.plan.report import CompiledStep, Plan
from zaya_jax.plan.search import SearchResult
from zaya_jax.plan.step_time import SHARES
from zaya_jax.plan.time_tables import figure, milliseconds, times_table
from zaya_jax.tables import format_bytes, name_column, number_column


def plan_tables(plan: Plan) -> Iterator[Table]:
    """What arithmetic says of a run."""
    yield _run(plan)
    yield _operations(plan)
    yield _memory(plan)
    yield _policies(plan)
    yield _seconds(plan)
    yield _gemms(plan)


def compiled_tables(step: CompiledStep, plan: Plan) -> Iterator[Table]:
    """What the compiled step says."""
    yield _compiled_memory(step, plan)
    yield times_table(step.times, plan)
    yield _collectives(step)
    yield _buffers(step)
    yield _kernels(step)


def kernels_table(steps: Mapping[str, CompiledStep], plan: Plan) -> Table:
    """A step compiled in several ways, side by side."""
    rows = f"{plan.micro_batch:,} x {plan.own_tokens:,}"
    title = f"the step, {rows} tokens at a time, without and with Pallas kernels"
    table = Table(name_column("a GPU"), *map(number_column, steps), title=title)

    def add(what: str, tell: Callable[[CompiledStep], str]) -> None:
        table.add_row(what, *map(tell, steps.values()))

    add("arguments", lambda step: format_bytes(step.memory.arguments))
    add("temporaries", lambda step: format_bytes(step.memory.temporaries))
    add("memory in all", lambda step: format_bytes(step.memory.total))
    add("GB moved a step: operands and results of all kernels", lambda step: figure(step.moved_bytes / 1e9))
    for scope in next(iter(steps.values())).moved_bytes_by_scope:
        add(f"  {scope}", lambda step, scope=scope: figure(step.moved_bytes_by_scope[scope] / 1e9))
    add("kernels made by XLA", lambda step: f"{step.num_kernels:,}")
    add("  that spill, or take scratch or too much LDS", lambda step: f"{len(step.problems):,}")
    for share in SHARES:
        add(
            f"ms a step, modelled, products at {share:.0%} of peak",
            lambda step, share=share: next(
                milliseconds(time.seconds) for time in step.times if time.share == share
            ),
        )
    add("s to compile", lambda step: f"{step.compile_seconds:.0f}")
    return table


def found_table(found: SearchResult, plan: Plan) -> Table:
    """What a search compiled, which of it fits, and the best of it."""
    columns = map(number_column, ("sequences", "GPUs", "memory"))
    table = Table(name_column("remat"), *columns, "fits", title="compiled by the search")
    limit = plan.device_memory
    for trial in found.trials:
        fits = "yes" if trial.num_bytes <= limit else "no"
        shares = f"{trial.micro_batch:,}", f"{trial.context_devices:,}"
        table.add_row(trial.remat, *shares, format_bytes(trial.num_bytes), fits)
    cheapest = found.cheapest_remat or "none of them fits"
    own = f"{plan.context_gpus:,}"
    table.add_row("cheapest", f"{plan.micro_batch:,}", own, "", cheapest, style="bold")
    for remat, seconds in found.seconds.items():
        style = "bold" if remat == found.fastest_remat else None
        named = "fastest, by the model" if style else ""
        table.add_row(remat, f"{plan.micro_batch:,}", own, f"{milliseconds(seconds)} ms", named, style=style)
    largest = f"{found.largest_micro_batch:,}" if found.largest_micro_batch else "not even one fits"
    table.add_row("largest", largest, own, "", found.largest_remat, style="bold")
    for shared in found.sharings:
        size, fits = format_bytes(shared.num_bytes), "yes" if shared.num_bytes <= limit else "no"
        time = "" if shared.seconds is None else f", {milliseconds(shared.seconds)} ms"
        name = f"experts on {shared.node_devices:,} GPU" + "s" * (shared.node_devices > 1)
        table.add_row(name, f"{plan.micro_batch:,}", own, size, fits + time)
    fewest = f"{found.fewest_context_devices:,}" if found.fewest_context_devices else "none"
    table.add_row("fewest", "1", fewest, "", found.largest_remat, style="bold")
    return table


def _run(plan: Plan) -> Table:
    title = f"{plan.run} on {plan.nodes:,} x {plan.gpus_per_node} {plan.device}"
    table = Table(name_column("what"), name_column("how much"), title=title)
    data, bound = plan.data, plan.seconds[plan.bound]
    table.add_row("parameters", f"{plan.parameters:,}")
    table.add_row("active a token, without embedding", f"{plan.active_parameters:,}")
    table.add_row("tokens a step", f"{plan.batch_size:,} x {plan.sequence_length:,} = {plan.tokens:,}")
    table.add_row("sequences a GPU at a time", f"{plan.micro_batch:,}")
    if plan.context_gpus > 1:
        table.add_row("GPUs that share a sequence", f"{plan.context_gpus:,}: {plan.own_tokens:,} tokens each")
    table.add_row("data a step, at 4 bytes a token", f"{data.pages:,.0f} pages of 4 KiB")
    table.add_row("storage of 70,000 IOPS keeps up with", f"steps of {data.shortest_step:.3g} s or more")
    table.add_row("  where a page costs 8 reads", f"{data.shortest_step_scattered:.3g} s")
    table.add_row("  IOPS at the shortest step that could be", f"{data.iops(bound):,.0f}")
    return table


def _operations(plan: Plan) -> Table:
    work = plan.operations
    columns = map(number_column, ("forward, a token", "share"))
    table = Table(name_column("FLOPs"), *columns, title="operations")
    total = sum(work.forward.values())
    for part, flops in work.forward.items():
        table.add_row(part, f"{flops:.4g}", f"{flops / total:.1%}")
    table.add_row("forward and backward", f"{work.training:.4g}", "")
    table.add_row(f'recomputed, remat "{plan.remat}"', f"{work.recomputed:.4g}", "")
    table.add_row("", "a GPU and step", "")
    step = (work.training + work.recomputed) * plan.tokens / plan.num_gpus
    table.add_row("network", f"{step:.4g}", f"{step / (step + work.optimizer):.1%}")
    table.add_row("optimiser", f"{work.optimizer:.4g}", f"{work.optimizer / (step + work.optimizer):.1%}")
    if work.optimizer:
        ratio = work.optimizer_replicated / work.optimizer
        table.add_row("  if each GPU did all matrices", f"{work.optimizer_replicated:.4g}", f"{ratio:,.0f} x")
    return table


def _memory(plan: Plan) -> Table:
    table = Table(name_column("memory a GPU, by arithmetic"), number_column("size"), title="memory")
    for kind, size in plan.memory.items():
        table.add_row(kind, format_bytes(size))
    total = f"{format_bytes(sum(plan.memory.values()))} of {format_bytes(plan.device_memory)}"
    table.add_row("sum", total, style="bold")
    return table


def _policies(plan: Plan) -> Table:
    title = f"what remat keeps of {plan.micro_batch:,} x {plan.own_tokens:,} tokens"
    table = Table(name_column("remat"), *map(number_column, ("activations", "recomputed")), title=title)
    for name, policy in plan.policies.items():
        table.add_row(
            name, format_bytes(policy.activations), f"{policy.recomputed / plan.operations.training:.1%}"
        )
    return table


def _seconds(plan: Plan) -> Table:
    links = plan.communication
    title = (
        f"time of a step: {figure(links.reduced_bytes / 1e9)} GB of gradients reduce-scattered in "
        f"{links.reduced_dtype}, {figure(links.gathered_bytes / 1e9)} GB of weights all-gathered"
    )
    columns = name_column("resource of a GPU"), number_column("ms at least")
    if links.expert_bytes:
        title += f"; {figure(links.expert_bytes / 1e9)} GB of experts and their gradients within each node"
    if plan.context_gpus > 1:
        shared = links.shared
        title += (
            f"; for shared sequences {figure(shared.keys / 1e9)} GB of keys and values, "
            f"{figure(shared.gradients / 1e9)} of their gradients, {figure(shared.halos / 1e9)} of halos"
        )
    table = Table(*columns, title=title, caption=_price_of_sums(plan))
    for resource, seconds in plan.seconds.items():
        name = f"{resource}, as measured" if resource in plan.measured else resource
        table.add_row(name, figure(1e3 * seconds))
    lower, in_turn = plan.seconds[plan.bound], plan.seconds_in_turn
    table.add_row("no step is shorter than", f"{plan.bound}: {figure(1e3 * lower)}", style="bold")
    table.add_row(f"one after the other, products at {SHARES[0]:.0%} of peak", figure(1e3 * in_turn))
    rate = plan.tokens / in_turn / plan.num_gpus
    table.add_row("  tokens a second and GPU, at most", f"{rate:,.0f}")
    return table


def _price_of_sums(plan: Plan) -> str | None:
    """What gradients in float32 cost on their way, and why; None on a device of its own."""
    links, narrow = plan.communication, plan.narrow_communication
    if not links.reduced_bytes or links.reduced_bytes == narrow.reduced_bytes:
        return None
    network, node = (
        1e3 * (getattr(links, name) - getattr(narrow, name)) for name in ("network_seconds", "link_seconds")
    )
    return (
        f"gradients in bfloat16 would be {figure(narrow.reduced_bytes / 1e9)} GB, and {figure(network)} ms "
        f"less of the network, {figure(node)} of the links; what would be lost: zaya bench gradient-sum"
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
        name_column("memory a GPU, compiled"),
        number_column("how much"),
        title=f"compiled in {step.compile_seconds:.0f} s by XLA for {plan.device}",
    )
    table.add_row("arguments: state and batch", format_bytes(memory.arguments))
    table.add_row("outputs that do not take their place", format_bytes(memory.outputs - memory.aliased))
    table.add_row("temporaries", format_bytes(memory.temporaries))
    verdict = "fits" if memory.total <= plan.device_memory else "does not fit"
    total = f"{format_bytes(memory.total)} of {format_bytes(plan.device_memory)}: {verdict}"
    table.add_row("sum", total, style="bold")
    table.add_row("FLOPs of products a GPU, without Pallas kernels", f"{step.flops:.4g}")
    for scope, flops in step.flops_by_scope.items():
        table.add_row(f"  {scope}", f"{flops:.4g}")
    table.add_row("GB its kernels read and write", figure(step.moved_bytes / 1e9))
    return table


def _collectives(step: CompiledStep) -> Table:
    columns = ("count", "GB", "largest\narray, MB", "GFLOP\nmeanwhile", "kernels\nmeanwhile")
    table = Table(name_column("collective"), *map(number_column, columns))
    for kind, found in step.collectives.items():
        table.add_row(
            f"{kind}\n  of {', '.join(found.dtypes)}",
            f"{found.count:,}",
            figure(found.num_bytes / 1e9),
            figure(found.largest_bytes / 1e6),
            f"{found.overlapped_flops / 1e9:,.0f}",
            f"{found.overlapped_kernels:,}",
        )
    return table


def _buffers(step: CompiledStep) -> Table:
    table = Table(number_column("largest buffers"), name_column("values that share it"))
    for size, values in step.buffers:
        table.add_row(format_bytes(size), values)
    return table


def _kernels(step: CompiledStep) -> Table:
    title = f"{step.num_kernels:,} kernels made by XLA"
    table = Table(name_column("kernel"), name_column("what is wrong"), title=title)
    for name, problems in step.problems.items():
        table.add_row(name, "; ".join(problems))
    if not step.problems:
        table.add_row("all", "no spills, no scratch, no more LDS than there is")
    return table

"""A plan as a picture: where the memory goes, and where the time."""

import pathlib
from typing import Any

from zaya_jax.plan.report import CompiledStep, Plan

GIB = 2**30


FORMATS = (".pdf", ".png", ".svg")


def check_format(file: pathlib.Path) -> None:
    """Refuses what cannot be drawn.

    Raises:
      ValueError: if the file's name asks for another format than `FORMATS`, or matplotlib is missing.
    """
    if file.suffix not in FORMATS:
        raise ValueError(f"--picture is {file}; its name must end in one of {', '.join(FORMATS)}")
    new_figure()


def draw(file: pathlib.Path, plan: Plan, step: CompiledStep | None) -> None:
    """Writes a picture of a plan; the file's name says in which format.

    Raises:
      ValueError: as `check_format` does.
    """
    check_format(file)
    figure = new_figure()
    title = f"{plan.run}: {plan.nodes} x {plan.gpus_per_node} {plan.device}, "
    title += f"{plan.micro_batch} x {plan.own_tokens:,} tokens a GPU at a time"
    figure.suptitle(title)
    (memory, policies), (times, work) = figure.subplots(2, 2)
    _draw_memory(memory, plan, step)
    _draw_policies(policies, plan)
    _draw_times(times, plan, step)
    flops = plan.operations.forward | {"recomputed": plan.operations.recomputed / 3}
    _draw_bars(work, {name: value / 1e9 for name, value in flops.items()})
    work.set(title="work of a token's forward pass", xlabel="GFLOP (recomputed: a third of it)")
    figure.savefig(file, dpi=120)


def new_figure() -> Any:
    """An empty figure of the size that all pictures have.

    Raises:
      ValueError: if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--picture needs matplotlib; get it by pip install 'zaya_jax[plan]'") from None
    return Figure(figsize=(13, 9), layout="constrained")


def _draw_memory(axes: Any, plan: Plan, step: CompiledStep | None) -> None:
    bars = {"by arithmetic": plan.memory}
    if step is not None:
        memory = step.memory
        bars["compiled"] = {
            "arguments": memory.arguments,
            "temporaries": memory.temporaries + memory.outputs - memory.aliased,
        }
    colors = iter(range(20))
    for label, kinds in bars.items():
        left = 0.0
        for kind, size in kinds.items():
            axes.barh(label, size / GIB, left=left, label=kind, color=_color(next(colors)), edgecolor="white")
            left += size / GIB
    axes.axvline(plan.device_memory / GIB, color="black", linestyle="--")
    axes.set(title="memory of a GPU, and what it has", xlabel="GiB")
    _legend_below(axes)


def _color(number: int) -> tuple[float, float, float]:
    """One of twenty that can be told from each other."""
    from matplotlib import colormaps

    return colormaps["tab20"].colors[number]  # pyright: ignore[reportAttributeAccessIssue]


def _legend_below(axes: Any) -> None:
    """A legend that covers no bar."""
    axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)


def _draw_policies(axes: Any, plan: Plan) -> None:
    _draw_bars(axes, {name: policy.activations / GIB for name, policy in plan.policies.items()})
    axes.set(title="activations kept, by remat policy", xlabel="GiB")


def _draw_times(axes: Any, plan: Plan, step: CompiledStep | None) -> None:
    """Of a compiled step what takes it, by the model; else what each resource needs at least."""
    if step is None:
        _draw_bars(axes, {name: 1e3 * seconds for name, seconds in plan.seconds.items()})
        axes.set(title="time that each resource needs for a step", xlabel="ms at least")
        return
    for time in step.times:
        label, left = f"{time.share:.0%} of peak", 0.0
        waited = {"communication waited for": time.exposed_seconds}
        for kind, seconds in ({name: work.seconds for name, work in time.works.items()} | waited).items():
            # One colour and one entry of the legend a kind, whatever the share.
            color = f"C{list(time.works).index(kind)}" if kind in time.works else "lightgrey"
            named = kind if time is step.times[0] else None
            axes.barh(label, 1e3 * seconds, left=left, label=named, color=color, edgecolor="white")
            left += 1e3 * seconds
        axes.text(left, label, f" {left:,.0f}", va="center", fontsize=8)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set(title="time of the compiled step, by a model", xlabel="ms; no hardware run is recorded")
    _legend_below(axes)


def _draw_bars(axes: Any, values: dict[str, float]) -> None:
    bars = axes.barh(list(values), list(values.values()))
    axes.bar_label(bars, fmt="%.3g", padding=2)
    axes.margins(x=0.15)
    axes.invert_yaxis()

"""Picture of a plan: where memory and time go."""

import pathlib
from typing import Any

from zaya_jax.errors import UserError
from zaya_jax.options import check_output_file
from zaya_jax.plan.output.plan import CompiledStep, Plan
from zaya_jax.platform.shell import install_command

GIB = 2**30


FORMATS = (".pdf", ".png", ".svg")


def check_outputs(*, json_file: str | None, picture: str | None = None) -> None:
    """Checks output files before a measurement or a compilation, which takes minutes.

    Raises:
      UserError: if a file cannot be written, the picture's suffix is not one of `FORMATS`, or matplotlib is
        missing for it.
    """
    check_output_file("json", json_file)
    check_output_file("picture", picture)
    if picture:
        if not picture.endswith(FORMATS):
            raise UserError(f"--picture is {picture}; its name must end in one of {', '.join(FORMATS)}")
        # Making a figure is the test for matplotlib.
        new_figure()


def draw(file: pathlib.Path, plan: Plan, step: CompiledStep | None) -> None:
    """Writes a picture of a plan in the format of the file's suffix.

    Raises:
      UserError: if matplotlib is missing.
    """
    figure = new_figure()
    title = f"{plan.run}: {plan.nodes} x {plan.gpus_per_node} {plan.device}, "
    title += f"{plan.micro_batch} x {plan.own_tokens:,} tokens per GPU at a time"
    figure.suptitle(title)
    (memory, policies), (times, work) = figure.subplots(2, 2)
    _draw_memory(memory, plan, step)
    _draw_bars(policies, {name: policy.activations / GIB for name, policy in plan.policies.items()})
    policies.set(title="activations kept, by remat policy", xlabel="GiB")
    _draw_times(times, plan, step)
    flops = plan.operations.forward | {"recomputed": plan.operations.recomputed / 3}
    _draw_bars(work, {name: value / 1e9 for name, value in flops.items()})
    # A third, because the forward pass is a third of a training step's FLOPs.
    work.set(title="FLOPs of a token's forward pass", xlabel="GFLOP (recomputed: one third of it)")
    figure.savefig(file, dpi=120)


def new_figure() -> Any:
    """Returns an empty figure of the common size.

    Raises:
      UserError: if matplotlib is missing.
    """
    try:
        # Without pyplot no window system is needed, and no figure stays in a global list.
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"--picture needs matplotlib: {install_command('plan')}") from None
    return Figure(figsize=(13, 9), layout="constrained")


def _draw_memory(axes: Any, plan: Plan, step: CompiledStep | None) -> None:
    bars = {"by arithmetic": plan.memory}
    if step is not None:
        memory = step.memory
        bars["compiled"] = {
            "arguments": memory.arguments,
            # Outputs that alias donated arguments take no memory of their own.
            "temporaries": memory.temporaries + memory.outputs - memory.aliased,
        }
    # Both bars share one legend, and consist of different kinds, so that no color may come twice.
    colors = iter(range(20))
    for label, kinds in bars.items():
        left = 0.0
        for kind, size in kinds.items():
            axes.barh(label, size / GIB, left=left, label=kind, color=_color(next(colors)), edgecolor="white")
            left += size / GIB
    axes.axvline(plan.device_memory / GIB, color="black", linestyle="--")
    axes.set(title="memory of a GPU; dashed: capacity", xlabel="GiB")
    _legend_below(axes)


def _color(number: int) -> tuple[float, float, float]:
    """One of twenty distinct colors."""
    from matplotlib import colormaps

    return colormaps["tab20"].colors[number]  # pyright: ignore[reportAttributeAccessIssue]


def _legend_below(axes: Any) -> None:
    """Draws the legend below the axes, where it covers no bar."""
    axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)


def _draw_times(axes: Any, plan: Plan, step: CompiledStep | None) -> None:
    """Draws the modelled time of a compiled step; without one, the lower bound of each resource."""
    if step is None:
        _draw_bars(axes, {name: 1e3 * seconds for name, seconds in plan.bounds.items()})
        axes.set(title="lower bound of each resource's time per step", xlabel="ms")
        return
    for case, time in step.times.items():
        label, left = f"{case}, {time.share:.0%} of peak", 0.0
        waited = {"exposed communication": time.exposed_seconds}
        for kind, seconds in ({name: work.seconds for name, work in time.works.items()} | waited).items():
            # One color and one legend entry per kind, whatever the share.
            color = f"C{list(time.works).index(kind)}" if kind in time.works else "lightgrey"
            named = kind if time is next(iter(step.times.values())) else None
            axes.barh(label, 1e3 * seconds, left=left, label=named, color=color, edgecolor="white")
            left += 1e3 * seconds
        axes.text(left, label, f" {left:,.0f}", va="center", fontsize=8)
    # Space for the totals, which are written to the right of the bars.
    axes.margins(x=0.12)
    # matplotlib draws the first bar at the bottom.
    axes.invert_yaxis()
    axes.set(title="time of the compiled step, by a model", xlabel="ms; not measured on hardware")
    _legend_below(axes)


def _draw_bars(axes: Any, values: dict[str, float]) -> None:
    bars = axes.barh(list(values), list(values.values()))
    axes.bar_label(bars, fmt="%.3g", padding=2)
    # Space for the number at the end of the longest bar.
    axes.margins(x=0.15)
    # Matplotlib draws the first bar at the bottom.
    axes.invert_yaxis()

"""Tables of a plan on a terminal of 80 columns: no name and no figure is truncated."""

import dataclasses
import functools
import io
import re

import pytest
from rich.console import Console

from zaya_jax.model.weights import declare, flatten_weights
from zaya_jax.options import load_config
from zaya_jax.plan import dry_run
from zaya_jax.plan.cases import ASSUMPTIONS, CASES, TimeRange
from zaya_jax.plan.command import config_of_phase
from zaya_jax.plan.compiled.kernel_report import (
    KernelReport,
    _cases,
    choices_table,
    loops_table,
    resources_table,
    work_table,
)
from zaya_jax.plan.compiled.search import SearchResult, Sharing, Trial
from zaya_jax.plan.compiled.step_time import KERNEL_SCOPES, REST, StepTime, WorkTime
from zaya_jax.plan.devices import Cluster, find_device
from zaya_jax.plan.output.plan import SCOPES, CollectiveKind, CompiledStep, make_plan
from zaya_jax.plan.output.plan_tables import compiled_tables, found_table, kernels_table, plan_tables
from zaya_jax.plan.output.time_tables import (
    devices_table,
    effects_table,
    summary,
    verdict,
    verdict_by_arithmetic,
)
from zaya_jax.plan.rocm.code_objects import Kernel
from zaya_jax.plan.rocm.compiler import Memory
from zaya_jax.plan.rocm.machine_code import Loop
from zaya_jax.plan.shares import with_execution
from zaya_jax.text_tables import format_bytes

PRESETS = ("tiny", "zaya1_8b", "zaya1_base", "zaya1_74b")
DEVICE = find_device("mi300x")
STEP = CompiledStep(
    memory=Memory(arguments=2**35, outputs=2**35, aliased=2**34, temporaries=2**39, code=0),
    collectives={
        kind: CollectiveKind(
            count=12_345,
            num_bytes=19 * 10**9,
            largest_bytes=1_074_000_000,
            dtypes=("bf16", "f32"),
            overlapped_flops=1.2e14,
            overlapped_kernels=12_345,
        )
        for kind in ("all-gather", "reduce-scatter", "collective-permute")
    },
    flops=1.2e14,
    flops_by_scope=dict.fromkeys(SCOPES, 1e13),
    moved_bytes=98e12,
    moved_bytes_by_scope=dict.fromkeys(SCOPES, 1e12),
    times={
        case.name: StepTime(
            case=case.name,
            share=case.product_share,
            seconds=0.7,
            kernel_seconds=0.5,
            collective_seconds=0.5,
            exposed_seconds=0.25,
            between_nodes_seconds=0.125,
            exposed={
                "gradients of a layer's experts, all-to-all in the node": 0.125,
                "keys and values, collective-permute between nodes": 0.125,
            },
            works={
                name: WorkTime(seconds=0.5 / (len(KERNEL_SCOPES) + 1), flops=1e13, num_bytes=1e11)
                for name in (*(name for name, _ in KERNEL_SCOPES), REST)
            },
        )
        for case in CASES
    },
    step_range=TimeRange(
        seconds={"optimistic": 0.5, "published": 0.7, "pessimistic": 1.0},
        effects=dict.fromkeys(ASSUMPTIONS, (0.65, 0.75)) | {"bandwidth within a node": (0.6, 0.8)},
    ),
    buffers=[(2**34, "bf16[40,16,2048,2,2048], " * 6)],
    num_kernels=12_345,
    problems={"loop_multiply_fusion_" * 6: ["spills 12 vector and 3 scalar registers"]},
    compile_seconds=123.0,
    wall_seconds=234.0,
)


def at_80_columns(*tables):
    out = io.StringIO()
    console = Console(file=out, width=80, highlight=False)
    for table in tables:
        console.print(table)
    printed = out.getvalue()
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    return printed


@functools.cache
def plan_of(preset):
    config = config_of_phase(load_config(f"configs/{preset}.py", []))
    nodes = 1 if preset == "tiny" else 128
    return make_plan(config, Cluster(device=DEVICE, nodes=nodes, gpus_per_node=8))


@pytest.mark.parametrize("preset", PRESETS)
def test_each_weight_has_its_whole_name_on_a_line(preset):
    config = load_config(f"configs/{preset}.py", [])
    weights = flatten_weights(declare(config.model))
    printed = at_80_columns(dry_run._weights_table(weights, config))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    assert [row[0] for row in rows] == list(weights)
    assert [int(row[2].replace(",", "")) for row in rows] == [weight.size for weight in weights.values()]


@pytest.mark.parametrize(
    ("options", "name"), [([], "Muon"), (["normuon"], "NorMuon"), (["hyperball"], "MuonH")]
)
def test_the_optimizer_of_each_weight_is_named(options, name):
    config = load_config("configs/tiny.py", [f"--config.optimizer.{each}=True" for each in options])
    table = dry_run._weights_table(flatten_weights(declare(config.model)), config)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in at_80_columns(table).splitlines()]
    update = {row[0]: row[3] for row in rows if len(row) == 4}
    assert (update["layers/experts/down_proj"], update["embedding/table"]) == (name, "AdamW")


def test_sizes_of_axes_are_listed_once():
    """`[2, 4, 128, 2, 256]` of the experts' gates in configs/tiny.py."""
    config = load_config("configs/tiny.py", [])
    printed = at_80_columns(dry_run._weights_table(flatten_weights(declare(config.model)), config))
    assert " LEDQF " in printed
    sizes = " ".join(printed.partition("axes: ")[2].split()).split(", ")
    assert {"L 2", "E 4", "D 128", "Q 2", "F 256"} <= set(sizes)
    assert len(sizes) == len(set(sizes)) == 18


def test_numbers_of_four_phases_are_not_split():
    """8T, 4T, 1.2T and 0.66T tokens, as published, in columns of 13."""
    printed = at_80_columns(dry_run._phases_table(load_config("configs/zaya1_8b.py", [])))
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in printed.splitlines() if "│" in line}
    assert [float(cell) for cell in rows["tokens"]] == pytest.approx([8e12, 4e12, 1.2e12, 0.66e12], rel=1e-4)


@pytest.mark.parametrize("preset", ["tiny", "zaya1_8b"])
def test_a_plan_fits(preset):
    printed = at_80_columns(*plan_tables(plan_of(preset)))
    assert "weights and gradients of a group of layers" in printed
    assert "gate and up of all experts" in printed


def test_tables_of_a_compiled_step_fit():
    plan = plan_of("zaya1_8b")
    printed = at_80_columns(*compiled_tables(STEP, plan), kernels_table({"xla": STEP, "pallas": STEP}, plan))
    assert "collective-permute" in printed
    assert "560.00 GiB of 178.81 GiB: does not fit" in printed
    assert printed.count("98,000.0") == 3
    (name,) = STEP.problems
    cells = [line.split("│")[1].strip() for line in printed.splitlines() if line.startswith("│")]
    assert name in "".join(cells), "a name that is too long continues in the next line"


def test_the_time_of_a_step_has_units():
    """16.78M tokens in 0.7 s on 1,024 GPUs are 23,406 tokens/s per GPU; 489,338 such steps take 3.96 days."""
    plan = plan_of("zaya1_8b")
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in at_80_columns(*compiled_tables(STEP, plan)).splitlines()
        if len(cells := line.split("│")) == 6
    }
    assert rows["step"] == ["700.0"] * 3
    assert rows["exposed communication"] == ["250.0"] * 3
    assert rows["all between nodes"] == ["125.0"] * 3
    assert rows["overlapped communication"] == ["250.0"] * 3
    assert rows["tokens/s per GPU"] == ["23,406"] * 3
    assert rows["days of 489,338 steps"] == ["3.96"] * 3
    assert rows["thousand GPU hours"] == ["97.43"] * 3
    assert rows["MWh of GPUs at 750 W"] == ["73.07"] * 3
    assert verdict(STEP, plan) == (
        "does not fit: 560.00 GiB of 178.81 GiB; by the model 700.0 ms at 40% of peak, most of it "
        "waiting for communication (36%), attention's scores and values (9%)"
    )


def test_the_line_to_quote():
    """16.78M tokens on 1,024 GPUs in 0.5, 0.7 and 1 s; 489,338 steps."""
    assert summary(plan_of("zaya1_8b"), STEP) == (
        "runs/zaya1_8b on 128 x 8 mi300x: 700.0 ms per step (500.0 to 1,000.0), 23,406 tokens/s per GPU "
        "(16,384 to 32,768), 3.96 days for 489,338 steps (2.83 to 5.66); modelled from the compiled step "
        "with products at 40% of the peak (29% to 58%), from published "
        "figures, nothing measured; most uncertain: bandwidth within a node"
    )
    assert "by arithmetic without overlap" in summary(plan_of("zaya1_8b"))


def test_effects_are_listed_from_the_largest():
    printed = at_80_columns(effects_table(STEP.step_range))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    assert rows[0] == ["bandwidth within a node", "600.0", "800.0"]
    assert len(rows) == len(ASSUMPTIONS)


def test_arithmetic_has_a_verdict():
    assert verdict_by_arithmetic(plan_of("zaya1_74b")) == (
        "by arithmetic it fits: 71.17 GiB of 178.81 GiB; a step takes at least 867.5 ms for the "
        "links in the node; --compile models the step"
    )


def test_each_gpu_has_its_row():
    printed = at_80_columns(devices_table())
    rows = [line.split("│")[1].strip() for line in printed.splitlines() if line.startswith("│")]
    assert [row for row in rows if row] == ["mi300x", "mi325x", "mi355x", "h100", "h200", "b200"]


def test_a_plan_for_a_gpu_that_is_not_known_so_well():
    config = config_of_phase(load_config("configs/zaya1_8b.py", []))
    plan = make_plan(config, Cluster(device=find_device("h200"), nodes=128, gpus_per_node=8))
    printed = at_80_columns(*plan_tables(plan))
    assert "that the peak needs" not in printed


def test_the_table_of_a_search_fits():
    trials = [Trial(remat="attention_and_experts", micro_batch=4, context_devices=64, num_bytes=2**37)]
    result = SearchResult(
        trials=trials,
        cheapest_remat=None,
        seconds={"attention_and_experts": 0.7},
        sharings=[
            Sharing(node_devices=1, num_bytes=2**38, seconds=None),
            Sharing(node_devices=8, num_bytes=2**36, seconds=0.6),
        ],
        largest_micro_batch=16,
        largest_remat="group",
        fewest_context_devices=None,
    )
    printed = at_80_columns(found_table(result, plan_of("zaya1_8b")))
    assert "attention_and_experts" in printed
    assert "128.00 GiB" in printed
    one, eight = (line for line in printed.splitlines() if "experts on" in line)
    assert one.split("│")[-2].strip() == "no"
    assert eight.split("│")[-2].strip() == "yes, 600.0 ms"


def test_kernels_fit():
    names = [name for case in _cases() for name in case.kernels]
    sick = Kernel(
        name="", vgprs=256, sgprs=100, vgpr_spills=12, sgpr_spills=3, scratch_bytes=128, lds_bytes=65_536,
        threads=256, grid=100, matrix_instructions=1280, loop=Loop(instructions=1234, matrix=128,
        matrix_cycles=4096, vector=1234, vector_cycles=8192, local=123, memory=23, barriers=24),
    )  # fmt: skip
    reports = [KernelReport(name, dataclasses.replace(sick, name=name), True) for name in names]
    printed = at_80_columns(resources_table(reports, DEVICE))
    assert [line.split()[0] for line in printed.splitlines() if "65,536" in line] == names
    printed = at_80_columns(loops_table(reports, DEVICE))
    # One wave per SIMD: vector instructions take twice as long as products, and are not hidden.
    assert [line.split()[0] for line in printed.splitlines() if "8,192" in line and "33%" in line] == names
    printed = at_80_columns(work_table(DEVICE), choices_table())
    assert "residual_rms_norm" in printed


def test_a_small_run_has_no_row_of_zeros():
    """configs/tiny.py on eight GPUs: megabytes, microseconds and millions of operations."""
    printed = at_80_columns(*plan_tables(plan_of("tiny")))
    cells = {cell.strip() for line in printed.splitlines() for cell in line.split("│")}
    assert not cells & {"0.0", "0.00", "0.00 GiB"}
    assert "0.0 GB" not in printed
    assert "4.54 MiB" in cells  # 1,188,836 weights of 4 bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (2**20 - 1024, "1,023.00 KiB"),
        (7_549_344, "7.20 MiB"),
        (192 * 10**9, "178.81 GiB"),
        (2**41, "2,048.00 GiB"),
    ],
)
def test_bytes_in_the_unit_that_fits_them(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_gradients_are_summed_in_float32_without_shared_experts():
    config = with_execution(config_of_phase(load_config("configs/zaya1_8b.py", [])), node_devices=1)
    plan = make_plan(config, Cluster(device=DEVICE, nodes=128, gpus_per_node=8))
    printed = " ".join(at_80_columns(*plan_tables(plan)).split())
    assert "38.7 GB of gradients reduce-scattered in float32" in printed
    own = " ".join(at_80_columns(*plan_tables(plan_of("zaya1_8b"))).split())
    assert "of gradients reduce-scattered in bfloat16" in own
    assert "48.3 GB of experts and their gradients within each node" in own


@pytest.mark.parametrize(("preset", "rate"), [("zaya1_8b", 21_786), ("zaya1_74b", 3_178)])
def test_one_after_the_other_is_the_sum_of_all_resources(preset, rate):
    plan = plan_of(preset)
    in_turn = plan.seconds["matrix units"] / 0.4 + sum(
        plan.seconds[name] for name in ("memory", "links in the node", "network")
    )
    assert plan.seconds_in_turn == pytest.approx(in_turn)
    assert plan.tokens / plan.num_gpus / in_turn == pytest.approx(rate, abs=1)


@pytest.mark.parametrize("preset", ["zaya1_8b", "zaya1_74b"])
def test_each_line_is_called_what_it_is(preset):
    plan = plan_of(preset)
    file = io.StringIO()
    Console(file=file, width=80).print(list(plan_tables(plan))[5])
    text = file.getvalue()
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    rows = {cells[0]: cells[1:] for cells in lines}
    per_gpu = plan.tokens / plan.num_gpus
    bound, estimate = rows["tokens/s per GPU"]
    assert bound == f"at most {per_gpu / max(plan.bounds.values()):,.0f}"
    assert estimate == f"{per_gpu / plan.seconds_in_turn:,.0f}"
    assert rows["one after the other"][0] == ""
    assert rows[f"no step is shorter: {plan.bound}"][1] == ""
    assert re.search(r"bound, ms\s*┃\s*estimate, ms", text)
    assert f"takes at least {1e3 * max(plan.bounds.values()):.1f} ms" in verdict_by_arithmetic(plan)

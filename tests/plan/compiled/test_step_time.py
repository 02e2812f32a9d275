# ruff: noqa: E501 (verbatim output of XLA)
"""The modelled time of a compiled step, on programs small enough to compute by hand."""

import dataclasses

import pytest

from zaya_jax.plan.cases import PUBLISHED
from zaya_jax.plan.compiled.hlo import Program
from zaya_jax.plan.compiled.step_time import REST, collective_seconds, model_step
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.links import bus_factor

DEVICE = dataclasses.replace(
    MI300X,
    matrix_flops=1e12,
    float32_flops=1e11,
    memory_bandwidth=1e9,
    link_bandwidth=1e9,
    network_bandwidth=1e9,
)
CLUSTER = Cluster(device=DEVICE, nodes=4, gpus_per_node=2)
LINKS_REACHED, NETWORK_REACHED = 0.70, 0.88
"""Shares of the data sheet in [RCCL-runs] for messages of 10 to 40 ms on the wire: 315.3 of 448 GB/s and 353.4
of 400."""
GROUPS = "{{0,1,2,3,4,5,6,7}}"

TEXT = """\
HloModule jit_step, is_scheduled=true

%product (p0: bf16[1024,1024], p1: bf16[1024,1024]) -> bf16[1024,1024] {{
  %p0 = bf16[1024,1024]{{1,0}} parameter(0)
  %p1 = bf16[1024,1024]{{1,0}} parameter(1)
  ROOT %dot.1 = bf16[1024,1024]{{1,0}} dot(%p0, %p1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%body (t: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {{
  %t = (s32[], bf16[1024,1024]{{1,0}}) parameter(0)
  %x = bf16[1024,1024]{{1,0}} get-tuple-element(%t), index=1
  %fusion.1 = bf16[1024,1024]{{1,0}} fusion(%x, %x), kind=kCustom, calls=%product, metadata={{op_name="jit(step)/experts/dot"}}
  ROOT %next = (s32[], bf16[1024,1024]{{1,0}}) tuple(%i, %fusion.1)
}}

ENTRY %main (x: bf16[1024,1024]) -> bf16[1024,1024] {{
  %x.1 = bf16[1024,1024]{{1,0}} parameter(0)
  %g = f32[8000000]{{0}} parameter(1)
  {start}
  %begin = (s32[], bf16[1024,1024]{{1,0}}) tuple(%zero, %x.1)
  %while.1 = (s32[], bf16[1024,1024]{{1,0}}) while(%begin), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"{trips}"}}}}
  {done}
  ROOT %out = bf16[1024,1024]{{1,0}} copy(%x.1)
}}
"""
START = f"%rs = ((f32[8000000]{{0}}), f32[1000000]{{0}}) reduce-scatter-start(%g), replica_groups={GROUPS}"
DONE = "%rs-done = f32[1000000]{0} reduce-scatter-done(%rs)"
ROUND = max(2 * 1024**3 / (0.5 * 1e12), 3 * 2 * 1024**2 / 1e9)
"""Time of the loop: its bytes at 1 GB/s take longer than its operations at half of a TFLOP/s."""
COPY = 2 * 2 * 1024**2 / 1e9


def modelled(trips=10, *, start=START, done=DONE, share=0.5, cluster=CLUSTER):
    return model_step(Program(TEXT.format(trips=trips, start=start, done=done)), with_share(cluster, share))


def with_share(cluster, share):
    return cluster.in_case(dataclasses.replace(PUBLISHED, product_share=share))


def scattered():
    return collective_seconds("reduce-scatter", 32_000_000, tuple(range(8)), CLUSTER)


def test_kernels_count_with_their_bounds_as_often_as_they_run():
    time = modelled(start="", done="")
    assert time.seconds == time.kernel_seconds == pytest.approx(10 * ROUND + COPY)
    assert time.works["experts"].flops == 10 * 2 * 1024**3
    assert time.works["experts"].num_bytes == 10 * 3 * 2 * 1024**2
    assert time.works[REST].seconds == pytest.approx(COPY)
    assert modelled(start="", done="", share=1e-4).seconds == pytest.approx(10 * 2 * 1024**3 / 1e8 + COPY)


def test_products_of_float32_operands_have_their_own_peak():
    text = TEXT.format(trips=10, start="", done="").replace("bf16[1024,1024]", "f32[1024,1024]")
    loop = model_step(Program(text), with_share(CLUSTER, 1e-3)).works["experts"]
    assert loop.flops == 10 * 2 * 1024**3
    assert loop.seconds == pytest.approx(10 * 2 * 1024**3 / 1e8)


def test_computation_during_a_collective_hides_it():
    """Many iterations hide the whole collective; one hides as long as it takes itself."""
    long, short = modelled(trips=1000), modelled(trips=1)
    assert long.collective_seconds == short.collective_seconds == pytest.approx(scattered())
    assert (long.exposed_seconds, long.hidden_seconds) == (0.0, pytest.approx(scattered()))
    assert short.exposed_seconds == pytest.approx(scattered() - ROUND)
    assert short.seconds == pytest.approx(scattered() + COPY)
    assert short.hidden_seconds == pytest.approx(ROUND)


def test_collectives_wait_for_each_other():
    twice = START + "\n  " + START.replace("%rs =", "%rs2 =")
    done = DONE + "\n  " + DONE.replace("%rs", "%rs2")
    time = modelled(trips=1, start=twice, done=done)
    assert time.collective_seconds == pytest.approx(2 * scattered())
    assert time.seconds == pytest.approx(2 * scattered() + COPY)


@pytest.mark.parametrize("trips", [1, 2, 3, 7])
def test_a_loop_that_waits_in_each_iteration_waits_as_often(trips):
    own = "%g = f32[8000000]{0} get-tuple-element(%t), index=2"
    inner = TEXT.format(trips=trips, start="", done="")
    inner = inner.replace("  ROOT %next", f"  {own}\n  {START}\n  {DONE}\n  ROOT %next")
    time = model_step(Program(inner), with_share(CLUSTER, 0.5))
    assert time.exposed_seconds == pytest.approx(trips * scattered())
    assert time.seconds == pytest.approx(trips * (ROUND + scattered()) + COPY)


def test_the_slower_of_links_and_nics_counts():
    """A ring of 8 GPUs in 4 pairs: half of its hops are over links, and two NICs share the others."""
    result = collective_seconds("all-gather", 80_000_000, (), CLUSTER)
    each = 80e6 * bus_factor("all_gather", 8) / 2 / 1e9
    assert result == pytest.approx(each / LINKS_REACHED, rel=0.01)
    fast = dataclasses.replace(CLUSTER, device=dataclasses.replace(DEVICE, link_bandwidth=1e12))
    assert collective_seconds("all-gather", 80_000_000, (), fast) == pytest.approx(
        each / NETWORK_REACHED, rel=0.02
    )


@pytest.mark.parametrize(
    ("kind", "scope", "name"),
    [
        ("all-gather", "while/body/gather_weights", "weights, all-gather between nodes"),
        ("all-to-all", "transpose(jvp(gather_weights))", "gradients of weights, all-to-all between nodes"),
        ("all-to-all", "sum_gradients", "gradients of weights, all-to-all between nodes"),
        ("all-to-all", "checkpoint/experts", "gradients of a layer's experts, all-to-all between nodes"),
        ("all-reduce", "cond/optimizer", "optimizer, all-reduce between nodes"),
    ],
)
def test_exposed_time_names_what_a_collective_carries(kind, scope, name):
    start = START.replace("reduce-scatter", kind) + f', metadata={{op_name="jit(step)/{scope}/x"}}'
    time = modelled(start=start, done=DONE.replace("reduce-scatter", kind), trips=1)
    assert time.exposed == {name: pytest.approx(time.exposed_seconds)}


@pytest.mark.parametrize(
    ("groups", "ranks", "in_node"),
    [("{{0,1},{2,3},{4,5},{6,7}}", 2, True), ("[4,2]<=[8]", 2, True), ("[2,4]<=[4,2]T(1,0)", 4, False)],
)
def test_groups_in_a_node_and_between_nodes(groups, ranks, in_node):
    start = START.replace(GROUPS, groups)
    time = modelled(start=start, trips=1)
    rate = LINKS_REACHED if in_node else NETWORK_REACHED
    expected = 32e6 * bus_factor("reduce_scatter", ranks) / 1e9 / rate
    assert time.collective_seconds == pytest.approx(expected, rel=0.02)
    assert time.exposed_seconds > 0
    assert time.between_nodes_seconds == (0 if in_node else time.exposed_seconds)
    where = "in the node" if in_node else "between nodes"
    assert time.exposed == {f"gradients of statistics, reduce-scatter {where}": time.exposed_seconds}


def test_a_queued_collective_waits_for_its_predecessor():
    """The step waits for a collective in the node, while one between nodes occupies the links first."""
    between, in_node = (START.replace(GROUPS, groups) for groups in ("[2,4]<=[4,2]T(1,0)", "[4,2]<=[8]"))
    start = between + "\n  " + in_node.replace("%rs =", "%rs2 =")
    done = DONE.replace("%rs", "%rs2") + "\n  " + DONE
    time, first = modelled(trips=1, start=start, done=done), modelled(trips=1, start=between)
    assert time.between_nodes_seconds == pytest.approx(first.exposed_seconds)
    assert time.exposed_seconds > time.between_nodes_seconds
    assert sum(time.exposed.values()) == pytest.approx(time.exposed_seconds)
    assert len(time.exposed) == 2


@pytest.mark.parametrize(
    ("stream", "links_at_once", "groups", "overlaps"),
    [
        ("1", True, ("[2,4]<=[4,2]T(1,0)", "[4,2]<=[8]"), True),
        ("0", True, ("[2,4]<=[4,2]T(1,0)", "[4,2]<=[8]"), False),
        ("1", False, ("[2,4]<=[4,2]T(1,0)", "[4,2]<=[8]"), False),
        ("1", True, ("[4,2]<=[8]", "[4,2]<=[8]"), False),
        ("1", True, (GROUPS, "[4,2]<=[8]"), False),
    ],
    ids=["two streams", "one stream", "one after the other", "same links", "all links"],
)
def test_collectives_on_two_streams_overlap_if_their_links_differ(stream, links_at_once, groups, overlaps):
    """The assigned stream is an attribute of the instruction; collectives without it have the first one."""
    one, two = (START.replace(GROUPS, group) for group in groups)
    one += f', frontend_attributes={{_xla_stream_annotation="{stream}"}}'
    case = dataclasses.replace(PUBLISHED, product_share=0.5, links_at_once=links_at_once)
    cluster = CLUSTER.in_case(case)

    def model(start, done):
        return model_step(Program(TEXT.format(trips=1, start=start, done=done)), cluster)

    alone = [model(start, DONE).collective_seconds for start in (one, two)]
    time = model(f"{one}\n  {two.replace('%rs =', '%rs2 =')}", f"{DONE}\n  {DONE.replace('%rs', '%rs2')}")
    assert time.collective_seconds == pytest.approx(sum(alone))
    assert time.seconds == pytest.approx((max if overlaps else sum)(alone) + COPY)
    assert time.exposed_seconds == pytest.approx(time.seconds - time.kernel_seconds)


def test_a_small_all_reduce_takes_no_longer_than_a_tree():
    """The floor of two nodes, and six more levels of a tree instead of 1,000 more steps of a ring."""
    many = Cluster(device=MI300X, nodes=128, gpus_per_node=8)
    floor = 218.7e-6 + 2 * 6 * PUBLISHED.network_step_seconds
    assert collective_seconds("all-reduce", 4, (), many) == pytest.approx(floor)


PALLAS = """\
ENTRY %main (q: bf16[4,4096,8,128]) -> bf16[4,4096,8,128] {
  %q = bf16[4,4096,8,128]{3,2,1,0} parameter(0)
  %k = bf16[4,4096,2,128]{3,2,1,0} parameter(1)
  %x = bf16[16384,2048]{1,0} parameter(2)
  %w = bf16[16,2048,4096]{2,1,0} parameter(3)
  %grouped = bf16[16384,4096]{1,0} custom-call(%x, %w), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/experts/grouped_matmul/pallas_call"}
  ROOT %flash = (bf16[4,4096,8,128]{3,2,1,0}, f32[4,8,4096]{2,1,0}) custom-call(%q, %k, %k), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/attention/flash_attention/pallas_call"}
}
"""


@pytest.mark.parametrize(
    ("name", "operands", "made", "flops"),
    [
        ("grouped_swiglu", ["bf16[64,32]", "bf16[4,32,96]"], "bf16[64,48]", 2 * 64 * 32 * 96),
        ("grouped_matmul_grad_weights", ["bf16[64,32]", "bf16[64,96]"], "bf16[4,32,96]", 2 * 64 * 32 * 96),
        ("cross_entropy", ["bf16[64,32]", "bf16[999,32]"], "f32[9,64]", 2 * 64 * 32 * 999),
        ("cross_entropy_grad_logits", ["bf16[64,32]", "bf16[999,32]"], "bf16[64,128]", 2 * 64 * 32 * 128),
        ("newton_schulz_gram", ["bf16[3,16,64]", "s32[2,2]"], "f32[3,16,16]", 3 * 16 * 16 * 64),
        ("newton_schulz_product", ["f32[3,16,16]", "bf16[3,16,64]"], "bf16[3,16,64]", 2 * 3 * 16 * 16 * 64),
        ("cca", ["bf16[4,512,640]", "bf16[5,2,128,128]"], "bf16[4,512,512]", 2 * 4 * 512 * 5 * 2 * 128**2),
        (
            "cca_grad_kernel",
            ["bf16[4,512,640]", "f32[640]"],
            "f32[16,5,2,128,128]",
            2 * 4 * 512 * 5 * 2 * 128**2,
        ),
        ("cca_sums", ["f32[1,16,640]", "f32[640]"], "f32[1,640]", 0),
        ("residual_rms_norm", ["f32[64,32]", "f32[64,32]"], "f32[64,32]", 0),
    ],
)
def test_each_kernel_of_pallas_has_its_operations(name, operands, made, flops):
    lines = [f"  %p{n} = {what}{{0}} parameter({n})" for n, what in enumerate(operands)]
    call = f'%k = {made}{{0}} custom-call(%p0, %p1), custom_call_target="__gpu$xla.gpu.triton"'
    call += f', metadata={{op_name="jit(step)/loss/{name}/pallas_call"}}'
    text = "\n".join(["ENTRY %main (p: f32[1]) -> f32[1] {", *lines, f"  ROOT {call}", "}"])
    assert model_step(Program(text), CLUSTER).works["loss"].flops == flops


def test_kernels_of_pallas_count():
    works = model_step(Program(PALLAS), CLUSTER).works
    assert works["attention's scores and values"].flops == 4 * 8 * 4096**2 * 128 * 2
    assert works["experts"].flops == 2 * 16384 * 2048 * 4096


def test_products_in_pallas_kernels_may_be_slower_than_others():
    def seconds(rate):
        case = dataclasses.replace(PUBLISHED, product_share=1e-3, kernel_rate=rate)
        return model_step(Program(PALLAS), CLUSTER.in_case(case)).seconds

    assert seconds(0.25) == pytest.approx(4 * seconds(1.0))
    # Products of the library keep their rate.
    case = dataclasses.replace(PUBLISHED, product_share=0.5, kernel_rate=0.25)
    text = TEXT.format(trips=10, start="", done="")
    assert model_step(Program(text), CLUSTER.in_case(case)) == modelled(start="", done="")

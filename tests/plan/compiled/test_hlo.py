# ruff: noqa: E501, RUF001 (verbatim output of XLA)
"""The parser of compiled programs, on one small enough to count by hand."""

from zaya_jax.plan.compiled.hlo import Program, largest_buffers
from zaya_jax.plan.compiled.traffic import CALLERS, moved_bytes

TEXT = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[64,32]{1,0})->f32[8]{0}}

%product (p0: bf16[64,32], p1: bf16[32,16]) -> f32[64,16] {
  %p0 = bf16[64,32]{1,0} parameter(0)
  %p1 = bf16[32,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[64,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/transpose(jvp(attention))/dot_general"}
}

%body (t: (s32[], bf16[64,32], bf16[32,16])) -> (s32[], bf16[64,32], bf16[32,16]) {
  %t = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) parameter(0)
  %x = bf16[64,32]{1,0} get-tuple-element(%t), index=1
  %w = bf16[32,16]{1,0} get-tuple-element(%t), index=2
  %fusion.1 = f32[64,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%product
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %next = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) tuple(%i, %x, %w)
}

%condition (t: (s32[], bf16[64,32], bf16[32,16])) -> pred[] {
  %t.1 = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: bf16[64,32], g: f32[80,4]) -> f32[8] {
  %x.1 = bf16[64,32]{1,0} parameter(0)
  %g = f32[80,4]{1,0} parameter(1)
  %w.1 = bf16[4,16]{1,0} parameter(2)
  %reduce-scatter-start = ((f32[80,4]{1,0}), f32[10,4]{1,0}) reduce-scatter-start(%g), channel_id=1, to_apply=%add, metadata={op_name="jit(step)/sum_gradients/psum_scatter"}
  %all-gather-start = (bf16[4,16]{1,0}, bf16[32,16]{1,0}) all-gather-start(%w.1), channel_id=2, dimensions={0}
  %all-gather-done = bf16[32,16]{1,0} all-gather-done(%all-gather-start)
  %start = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) tuple(%zero, %x.1, %all-gather-done)
  %while.1 = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"40"}}
  %reduce-scatter-done = f32[10,4]{1,0} reduce-scatter-done(%reduce-scatter-start)
  %grouped = (bf16[64,48]{1,0}, s8[8]{0}) custom-call(%x.1, %experts, %sizes), custom_call_target="__cublas$lt$groupedMatmul", metadata={op_name="jit(step)/experts/ragged_dot"}
  %experts = bf16[3,32,48]{2,1,0} parameter(3)
  %all-reduce.1 = f32[] all-reduce(%loss), to_apply=%add
  %loss = f32[] constant(0)
  ROOT %out = f32[8]{0} fusion(%reduce-scatter-done), kind=kLoop, calls=%add
}
"""


def test_products_count_as_often_as_they_run():
    program = Program(TEXT)
    attention, experts = 40 * 2 * 64 * 32 * 16, 2 * 64 * 32 * 48
    assert program.flops("attention") == attention
    assert program.flops("experts") == experts
    assert program.flops() == attention + experts


def test_collectives_and_what_runs_concurrently():
    result = {collective.kind: collective for collective in Program(TEXT).collectives}
    assert set(result) == {"reduce-scatter", "all-gather", "all-reduce"}
    scattered, gathered, reduced = (result[k] for k in ("reduce-scatter", "all-gather", "all-reduce"))
    assert scattered.num_bytes == 80 * 4 * 4
    assert scattered.overlapped_flops == 40 * 2 * 64 * 32 * 16
    assert scattered.overlapped_kernels == 40
    assert scattered.op_name.endswith("psum_scatter")
    assert gathered.num_bytes == 32 * 16 * 2
    assert gathered.overlapped_kernels == 0
    assert reduced.num_bytes == reduced.largest_bytes == 4
    assert reduced.overlapped_flops == 0


def test_the_largest_buffers_come_first():
    report = """\
Memory Space: default (color=0)
Total bytes: 158828920073 (147.92GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
    2.00MiB( 13%);    2.00MiB;   2147;                2; bf16[1,2], f32[16,26]
   20.00GiB( 27%);   20.00GiB;      0;               16; f32[40,16], 7×f32[1280,2048]
        16B(100%);        16B;      0;                1; (bf16[], bf16[128,4096])
"""
    assert largest_buffers(report, 2) == [
        (20 * 2**30, "f32[40,16], 7×f32[1280,2048]"),
        (2 * 2**20, "bf16[1,2], f32[16,26]"),
    ]


SLICED = """\
HloModule jit_scan, is_scheduled=true

%take (p0: f32[40,8], p1: s32[], p2: f32[8]) -> f32[8] {
  %p0 = f32[40,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[8]{0} parameter(2)
  %slice = f32[1,8]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,8}
  %row = f32[8]{0} bitcast(%slice)
  ROOT %sum = f32[8]{0} add(%row, %p2)
}

%put (p0: f32[40,8], p1: f32[1,8], p2: s32[]) -> f32[40,8] {
  %p0.1 = f32[40,8]{1,0} parameter(0)
  %p1.1 = f32[1,8]{1,0} parameter(1)
  %p2.1 = s32[] parameter(2)
  ROOT %new = f32[40,8]{1,0} dynamic-update-slice(%p0.1, %p1.1, %p2.1, %p2.1)
}

%body (t: (s32[], f32[40,8], f32[8])) -> (s32[], f32[40,8], f32[8]) {
  %t = (s32[], f32[40,8]{1,0}, f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %all = f32[40,8]{1,0} get-tuple-element(%t), index=1
  %x = f32[8]{0} get-tuple-element(%t), index=2
  %taken = f32[8]{0} fusion(%all, %i, %x), kind=kLoop, calls=%take, metadata={op_name="jit(f)/while/loss/add"}
  %put.1 = f32[40,8]{1,0} fusion(%all, %taken, %i), kind=kLoop, calls=%put
  ROOT %next = (s32[], f32[40,8]{1,0}, f32[8]{0}) tuple(%i, %put.1, %taken)
}

ENTRY %main (all: f32[40,8]) -> f32[40,8] {
  %all.1 = f32[40,8]{1,0} parameter(0)
  %start = (s32[], f32[40,8]{1,0}, f32[8]{0}) tuple(%zero, %all.1, %x.1)
  %while.1 = (s32[], f32[40,8]{1,0}, f32[8]{0}) while(%start), body=%body, backend_config={"known_trip_count":{"n":"40"}}
  %got = f32[40,8]{1,0} get-tuple-element(%while.1), index=1
  ROOT %copy = f32[40,8]{1,0} copy(%got)
}
"""


def test_a_slice_counts_as_a_slice():
    program = Program(SLICED)
    assert program.runs(CALLERS) == {"main": 1, "body": 40}
    row, index, whole = 8 * 4, 4, 40 * 8 * 4
    taking = row + index + row + row  # a slice, its index, the sum's other side, the sum
    putting = row + index + row  # in place: the new row is read and written
    assert moved_bytes(program) == 40 * (taking + putting) + 2 * whole
    assert moved_bytes(program, "loss") == 40 * taking
    assert moved_bytes(program, "los") == 0


IN_PLACE = """\
%look_up (p0: bf16[4,5,8], p1: s32[3,1]) -> f32[3,8] {
  %p0 = bf16[4,5,8]{2,1,0} parameter(0)
  %p1 = s32[3,1]{1,0} parameter(1)
  %turned = bf16[5,4,8]{2,1,0} transpose(%p0), dimensions={1,0,2}
  %table = bf16[20,8]{1,0} bitcast(%turned)
  %rows = bf16[3,8]{1,0} gather(%table, %p1), offset_dims={1}, slice_sizes={1,8}
  ROOT %wide = f32[3,8]{1,0} convert(%rows)
}

%add_rows (p0: f32[20,8], p1: f32[3,1,8], p2: s32[3,1]) -> f32[20,8] {
  %p0.1 = f32[20,8]{1,0} parameter(0)
  %p1.1 = f32[3,1,8]{2,1,0} parameter(1)
  %p2.1 = s32[3,1]{1,0} parameter(2)
  ROOT %sums = f32[20,8]{1,0} scatter(%p0.1, %p2.1, %p1.1), update_window_dims={1,2}, to_apply=%add
}

ENTRY %main (table: bf16[4,5,8], rows: s32[3,1], updates: f32[3,1,8]) -> f32[20,8] {
  %table.1 = bf16[4,5,8]{2,1,0} parameter(0)
  %rows.1 = s32[3,1]{1,0} parameter(1)
  %updates.1 = f32[3,1,8]{2,1,0} parameter(2)
  %got = f32[3,8]{1,0} fusion(%table.1, %rows.1), kind=kLoop, calls=%look_up
  %sums.1 = f32[20,8]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %new = f32[20,8]{1,0} fusion(%sums.1, %updates.1, %rows.1), kind=kInput, calls=%add_rows
}
"""


def test_rows_of_a_table_count_as_rows_and_an_allocation_as_nothing():
    rows, indices = 3 * 8, 3 * 4
    looking_up = rows * 2 + indices + rows * 4  # bfloat16 rows become float32
    adding = rows * 4 + indices + 2 * rows * 4  # the updates, and the sums read and written
    assert moved_bytes(Program(IN_PLACE)) == looking_up + adding

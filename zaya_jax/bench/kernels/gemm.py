"""`zaya bench gemm`: speed of a ZAYA1 step's matrix products, which sizes are slow, and what helps."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from zaya_jax.bench.measure import free_device_memory, repeated_seconds
from zaya_jax.bench.results import this_machine, write_json
from zaya_jax.errors import UserError
from zaya_jax.options import Parser, check_positive, load_config
from zaya_jax.plan.arithmetic import Gemm, gemms
from zaya_jax.plan.command import config_of_phase
from zaya_jax.plan.measured import ProductTime, ProductTimes
from zaya_jax.plan.output.picture import check_outputs
from zaya_jax.text_tables import name_column, number_column

PRESET = "configs/zaya1_8b.py"
NUM_GPUS = 1024
"""Number of GPUs in the published training ([ZAYA1-8B] appendix A)."""
ACCEPTED = Gemm(name="as AMD accepts nodes by", rows=8192, depth=8192, columns=8192)
PROBE = Gemm(name="probe", rows=512, depth=512, columns=512)
CALL_SECONDS = 1.0
"""Products that would take longer, estimated from the probe's rate, are skipped."""
TILE = 256
"""Tile size of a compute unit; a side that is not a multiple wastes part of a tile."""
SLOW_SHARE = 0.5
"""A product is slow if it reaches less than this share of the best product's rate."""
MIN_GAIN = 0.05
"""Share of the time that a change must save to be advised."""
RAGGED_COST = 1.25
"""Factor on the time above which one additional row counts as a problem."""
PADDED, DOUBLED, RAGGED = "padded", "2 x rows", "1 row more"
VARIANTS = (PADDED, DOUBLED, RAGGED)
OF_EXPERTS = "of all experts"
"""Suffix of the names of products whose number of rows depends on the routing."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench gemm` with the given command-line arguments.

    Raises:
      UserError: if an option is invalid.
    """
    parser = _parser()
    options, overrides = parser.parse_with_fields(argv)
    check_outputs(json_file=options.json)
    config = config_of_phase(load_config(options.config, overrides))
    if options.gpus < 1 or config.data.batch_size % options.gpus:
        raise UserError(f"--gpus is {options.gpus}; it must divide the batch of {config.data.batch_size}")
    check_positive(options, "call_seconds")
    # Names of products contain numbers and brackets, which rich would color.
    console = Console(soft_wrap=True, highlight=False)
    with console.status("timing products") as status:
        timings, skipped = measure(
            [*gemms(config, options.gpus), ACCEPTED],
            config.execution.dtype,
            call_seconds=options.call_seconds,
            progress=lambda name: status.update(f"timing {name}"),
        )
    write_json(options.json, dataclasses.asdict(timings))
    console.print(table(timings))
    if skipped:
        console.print(
            f"skipped, because they would take longer than {options.call_seconds:g} s here or need more "
            f"memory than is free: {', '.join(skipped)}"
        )
    for sentence in advice(timings):
        console.print(f"- {sentence}")


def measure(
    products: Sequence[Gemm],
    dtype: str,
    *,
    call_seconds: float,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[ProductTimes, list[str]]:
    """Times products and their variants. Returns also the names of products that are too large for this
    machine.

    Args:
      products: matrix products of a step.
      dtype: dtype of the matrices.
      call_seconds: products that would take longer are skipped.
      progress: callback that receives the name of the current product.
    """
    # A small product shows the speed of this machine, on which a large one may take minutes.
    (probed,) = product_times([PROBE], dtype)
    times, skipped = [], []
    for product in products:
        progress(product.name)
        together = [product, *variants(product)]
        # A product and its variants are in memory together, because their timings alternate.
        num_bytes = sum(needed_bytes(each, dtype) for each in together)
        if product.flops / probed.rate > call_seconds or num_bytes > free_device_memory() // 2:
            skipped.append(product.name)
        else:
            times += product_times(together, dtype)
    # A file without any measurement would be invalid: on a small machine the probe stands in.
    return ProductTimes(machine=this_machine(), dtype=dtype, products=tuple(times or [probed])), skipped


def variants(product: Gemm) -> Iterator[Gemm]:
    """Yields variants of a product that may be faster, or slower.

    They are: all sides padded to multiples of `TILE`; twice the rows, where a setting can provide them; and
    one more row, where the routing determines the number of rows.
    """
    # Its rate is compared with AMD's figure, which is for this size alone.
    if product == ACCEPTED:
        return
    sides = {name: getattr(product, name) for name in ("rows", "depth", "columns")}
    # All sides at once: padding only one of them would leave partial tiles.
    padded = {name: math.ceil(side / TILE) * TILE for name, side in sides.items()}
    if padded != sides:
        yield dataclasses.replace(product, name=f"{product.name}, {PADDED}", **padded)
    if rows_setting(product.name):
        yield dataclasses.replace(product, name=f"{product.name}, {DOUBLED}", rows=2 * product.rows)
    if product.name.endswith(OF_EXPERTS):
        # One row more than planned shows what a load costs that does not fill whole tiles.
        yield dataclasses.replace(product, name=f"{product.name}, {RAGGED}", rows=product.rows + 1)


def rows_setting(name: str) -> str:
    """Returns the setting that gives a product more rows; "" for the optimizer's, whose sides are those of
    the weights.
    """
    if name.startswith("Newton-Schulz"):
        return ""
    # Logits are computed for a chunk of tokens at a time, so that the micro-batch does not change their rows.
    return "a larger execution.loss_chunk" if name.startswith("logits") else "a larger micro-batch"


def needed_bytes(product: Gemm, dtype: str) -> int:
    """Bytes of both matrices and their product."""
    sides = product.rows * product.depth + product.depth * product.columns + product.rows * product.columns
    return product.count * sides * jnp.dtype(dtype).itemsize


def product_times(products: Sequence[Gemm], dtype: str) -> list[ProductTime]:
    """Times products of random matrices alternately. Zeros would draw less power and allow a higher clock."""
    calls = [_call(product, dtype) for product in products]
    return [
        ProductTime(**dataclasses.asdict(product), seconds=seconds)
        for product, seconds in zip(products, repeated_seconds(calls), strict=True)
    ]


def _call(product: Gemm, dtype: str) -> Callable[[int], jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    shapes = (product.rows, product.depth), (product.depth, product.columns)
    left, right = (
        jax.random.normal(key, (product.count, *shape), dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )
    multiply = jax.jit(jnp.matmul)
    # JAX queues the calls, and the caller waits for the last result only.
    return lambda times: [multiply(left, right) for _ in range(times)][-1]


def table(timings: ProductTimes) -> Table:
    """Products with their rates, and each variant's time per row relative to the product's."""
    # Two-line headers, and names above sizes: otherwise 80 columns leave two letters for the names.
    headers = ("\n".join(name.rsplit(" ", 1)) for name in ("TFLOP/s", "of the best", *VARIANTS))
    title = f"products in {timings.dtype} on {timings.machine.device}"
    caption = "last columns: time per row relative to the product itself"
    rows = Table(name_column("product"), *map(number_column, headers), title=title, caption=caption)
    named = {each.name: each for each in timings.products}
    for each in _own(timings):
        size = f"{each.rows:,} x {each.depth:,} x {each.columns:,}"
        size = f"{each.count:,} of {size}" if each.count > 1 else size
        others = [named.get(f"{each.name}, {name}") for name in VARIANTS]
        ratios = ["" if other is None else f"{_relative_row_time(each, other):.2f}" for other in others]
        rows.add_row(
            f"{each.name}\n  {size}",
            f"{each.rate / 1e12:.3g}",
            f"{each.rate / timings.best_rate:.0%}",
            *ratios,
        )
    return rows


def _own(timings: ProductTimes) -> list[ProductTime]:
    # The last comma, because names of products have commas too ("values, each half").
    return [each for each in timings.products if each.name.rpartition(", ")[2] not in VARIANTS]


def _relative_row_time(product: ProductTime, variant: ProductTime) -> float:
    """Time per row relative to the product's. Padding rows do no useful work and do not count."""
    rows = product.rows if variant.name.endswith(PADDED) else variant.rows
    return variant.seconds / rows / (product.seconds / product.rows)


def advice(timings: ProductTimes) -> list[str]:
    """Returns one sentence for each slow product, with the variant that was measured to help."""
    named = {each.name: each for each in timings.products}
    own = _own(timings)
    sentences = [_advise(each, named, timings) for each in own if each.rate < SLOW_SHARE * timings.best_rate]
    for each in own:
        ragged = named.get(f"{each.name}, {RAGGED}")
        if ragged and _relative_row_time(each, ragged) > RAGGED_COST:
            sentences.append(
                f"{each.name}: one more row takes {_relative_row_time(each, ragged):.1f} times as long: pad "
                f"each expert's rows to a multiple of {TILE}, or use an implementation that does"
            )
    return sentences or [f"no product is below {SLOW_SHARE:.0%} of the best one's rate"]


def _advise(product: ProductTime, named: dict[str, ProductTime], timings: ProductTimes) -> str:
    begins = f"{product.name} reaches {product.rate / timings.best_rate:.0%} of the best product's rate"
    padded, doubled = (named.get(f"{product.name}, {name}") for name in (PADDED, DOUBLED))
    if padded and (ratio := _relative_row_time(product, padded)) < 1 - MIN_GAIN:
        size = f"{padded.rows:,} x {padded.depth:,} x {padded.columns:,}"
        return f"{begins}; padded to {size} it takes {1 - ratio:.0%} less time"
    if doubled and (ratio := _relative_row_time(product, doubled)) < 1 - MIN_GAIN:
        setting = rows_setting(product.name)
        return f"{begins}; with {setting}, twice its rows, a row takes {1 - ratio:.0%} less time"
    return f"{begins}; no variant helps: it is bound by memory, or the library has no kernel for its shape"


def _parser() -> Parser:
    parser = Parser(
        "bench gemm",
        "Time the matrix products of a step at the sizes of one GPU of the cluster, and the product of 8,192 "
        "cubed that AMD accepts nodes by. Reports which sizes are slow and whether padding or a larger "
        "micro-batch helps. zaya plan --measured reads the JSON file.",
        (
            "zaya bench gemm --json=gemm.json",
            "zaya bench gemm --config=configs/tiny.py --gpus=1",
            "zaya bench gemm --gpus=256 --config.execution.dtype=bfloat16",
        ),
    )
    parser.add_argument(
        "--config", default=PRESET, metavar="FILE", help="config whose matrix products are timed"
    )
    parser.add_argument("--gpus", default=NUM_GPUS, help="number of GPUs that share the run's batch")
    parser.add_argument(
        "--call-seconds",
        default=CALL_SECONDS,
        metavar="SECONDS",
        help="products that would take longer are skipped; in seconds",
    )
    parser.add_argument("--json", metavar="FILE", help="write all times")
    return parser

"""`zaya bench gemm`: how fast the matrix products of a ZAYA1 step are, which sizes are bad, and what helps."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from zaya_jax.bench.machine import check_outputs, this_machine, write_json
from zaya_jax.bench.measure import free_device_memory, repeated_seconds
from zaya_jax.options import Parser, load_config
from zaya_jax.plan.arithmetic import Gemm, gemms
from zaya_jax.plan.command import config_of_phase
from zaya_jax.plan.measured import ProductTime, ProductTimes
from zaya_jax.tables import name_column, number_column

PRESET = "configs/zaya1_8b.py"
NUM_GPUS = 1024
"""That the recipe was trained on ([ZAYA1-8B] appendix A)."""
ACCEPTED = Gemm(name="as AMD accepts nodes by", rows=8192, depth=8192, columns=8192)
PROBE = Gemm(name="probe", rows=512, depth=512, columns=512)
CALL_SECONDS = 1.0
"""Products that would take longer, by the probe's rate, are left out."""
TILE = 256
"""Sides of a block of the result that one compute unit makes; what is left of a side makes a block too."""
BAD_SHARE = 0.5
"""Of the best product's rate, below which a product is bad."""
WORTH = 0.05
"""Of the time, that a change must save to be advised."""
RAGGED_COST = 1.25
"""Times as long that a product with a row more may take."""
PADDED, DOUBLED, RAGGED = "padded", "twice the rows", "a row more"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench gemm` with the words behind it.

    Raises:
      ValueError: for what cannot be measured.
    """
    parser = _parser()
    options, overrides = parser.parse_with_fields(argv)
    check_outputs(json_file=options.json)
    config = config_of_phase(load_config(options.config, overrides))
    if options.gpus < 1 or config.data.batch_size % options.gpus:
        raise ValueError(f"--gpus is {options.gpus}; it must divide the batch of {config.data.batch_size}")
    if not options.call_seconds > 0:
        raise ValueError(f"--call-seconds is {options.call_seconds}; it must be above 0")
    console = Console(soft_wrap=True, highlight=False)
    with console.status("timing products") as status:
        found, left_out = measure(
            [*gemms(config, options.gpus), ACCEPTED],
            config.execution.dtype,
            call_seconds=options.call_seconds,
            progress=lambda name: status.update(f"timing {name}"),
        )
    write_json(options.json, dataclasses.asdict(found))
    console.print(table(found))
    if left_out:
        console.print(
            f"left out, for they would take longer than {options.call_seconds:g} s here or more memory than is "
            f"free: {', '.join(left_out)}"
        )
    for sentence in advice(found):
        console.print(f"- {sentence}")


def measure(
    products: Sequence[Gemm], dtype: str, *, call_seconds: float, progress: Callable[[str], None] = lambda _: None
) -> tuple[ProductTimes, list[str]]:
    """Times products and what may be better in their place; and names those that are too large for here.

    Args:
      products: of a step.
      dtype: of their matrices.
      call_seconds: as `CALL_SECONDS`.
      progress: is told what is being timed.
    """
    rate = PROBE.flops / product_seconds(PROBE, dtype)
    times, left_out = [], []
    for product in products:
        if product.flops / rate > call_seconds or needed_bytes(product, dtype) > free_device_memory() // 2:
            left_out.append(product.name)
            continue
        for each in [product, *variants(product)]:
            progress(each.name)
            shape = dataclasses.asdict(each)
            times.append(ProductTime(**shape, seconds=product_seconds(each, dtype)))
    if not times:
        times = [ProductTime(**dataclasses.asdict(PROBE), seconds=PROBE.flops / rate)]
    return ProductTimes(machine=this_machine(), dtype=dtype, products=tuple(times)), left_out


def variants(product: Gemm) -> Iterator[Gemm]:
    """The same product with all sides multiples of `TILE`, with twice the rows, and with a row more.

    Sides that are multiples already are not padded; AMD's own size stays as it is.
    """
    if product == ACCEPTED:
        return
    sides = {name: getattr(product, name) for name in ("rows", "depth", "columns")}
    padded = {name: math.ceil(side / TILE) * TILE for name, side in sides.items()}
    if padded != sides:
        yield dataclasses.replace(product, name=f"{product.name}, {PADDED}", **padded)
    yield dataclasses.replace(product, name=f"{product.name}, {DOUBLED}", rows=2 * product.rows)
    yield dataclasses.replace(product, name=f"{product.name}, {RAGGED}", rows=product.rows + 1)


def needed_bytes(product: Gemm, dtype: str) -> int:
    """Of both matrices and their product, of the largest variant."""
    rows = 2 * product.rows
    sides = rows * product.depth + product.depth * product.columns + rows * product.columns
    return product.count * sides * jnp.dtype(dtype).itemsize


def product_seconds(product: Gemm, dtype: str) -> float:
    """Time of a product of random matrices: zeros take less power, and run at a higher clock."""
    keys = jax.random.split(jax.random.key(0))
    shapes = (product.rows, product.depth), (product.depth, product.columns)
    left, right = (
        jax.random.normal(key, (product.count, *shape), dtype) for key, shape in zip(keys, shapes, strict=True)
    )
    multiply = jax.jit(jnp.matmul)
    return repeated_seconds(lambda times: [multiply(left, right) for _ in range(times)][-1])


def table(found: ProductTimes) -> Table:
    """Products and their rates beside the best of them."""
    columns = map(number_column, ("size", "ms", "TFLOP/s", "of the best"))
    title = f"products in {found.dtype} on {found.machine.device}"
    rows = Table(name_column("product"), *columns, title=title)
    for each in found.products:
        size = f"{each.rows:,} x {each.depth:,} x {each.columns:,}"
        size = f"{each.count:,} of {size}" if each.count > 1 else size
        share = each.rate / found.best_rate
        rows.add_row(each.name, size, f"{1e3 * each.seconds:.3g}", f"{each.rate / 1e12:.3g}", f"{share:.0%}")
    return rows


def advice(found: ProductTimes) -> list[str]:
    """What would make bad products better, as measured; one sentence for each of those."""
    named = {each.name: each for each in found.products}
    own = [each for each in found.products if each.name.rpartition(", ")[2] not in (PADDED, DOUBLED, RAGGED)]
    bad = [each for each in own if each.rate < BAD_SHARE * found.best_rate]
    sentences = [_advise(each, named, found.best_rate) for each in bad]
    ragged = [
        f"{each.name}: a row more takes {more.seconds / each.seconds:.1f} times as long: keep its rows a "
        f"multiple of {TILE}"
        for each in own
        if (more := named.get(f"{each.name}, {RAGGED}")) and more.seconds > RAGGED_COST * each.seconds
    ]
    return [*sentences, *ragged] or [f"no product is below {BAD_SHARE:.0%} of the best one's rate"]


def _advise(product: ProductTime, named: dict[str, ProductTime], best_rate: float) -> str:
    begins = f"{product.name} reaches {product.rate / best_rate:.0%} of the best product's rate"
    padded = named.get(f"{product.name}, {PADDED}")
    if padded and padded.seconds < (1 - WORTH) * product.seconds:
        size = f"{padded.rows:,} x {padded.depth:,} x {padded.columns:,}"
        return f"{begins}; padded to {size} it takes {1 - padded.seconds / product.seconds:.0%} less time"
    doubled = named.get(f"{product.name}, {DOUBLED}")
    if doubled and doubled.rate > (1 + WORTH) * product.rate:
        gain = doubled.rate / product.rate
        return f"{begins}; with twice the rows its rate is {gain:.2f} times that: take a larger micro-batch"
    return f"{begins}; neither padding nor more rows help: it is bound by memory, or its library has no tile for it"


def _parser() -> Parser:
    parser = Parser(
        "bench gemm",
        "Times the matrix products of a step as a GPU of the cluster has them, beside 8,192 cubed, by which AMD "
        "accepts nodes; says which sizes are bad and whether padding or a larger micro-batch helps. zaya plan "
        "--measured takes the JSON.",
        (
            "zaya bench gemm --json=gemm.json",
            "zaya bench gemm --config=configs/tiny.py --gpus=1",
            "zaya bench gemm --gpus=256 --config.execution.dtype=bfloat16",
        ),
    )
    parser.add_argument(
        "--config", default=PRESET, metavar="FILE", help="whose products (default: %(default)s)"
    )
    parser.add_argument(
        "--gpus", type=int, default=NUM_GPUS, help="that share the run's batch (default: %(default)s)"
    )
    parser.add_argument(
        "--call-seconds",
        type=float,
        default=CALL_SECONDS,
        metavar="SECONDS",
        help="products that would take longer are left out (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all times")
    return parser

"""Measured train steps with several sets of implementations, for `zaya bench step`."""

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from pallas_kernels.choice import platform_of
from zaya_jax.config import Config
from zaya_jax.data.corpora.delimiters import NO_DELIMITERS
from zaya_jax.data.reading.batch import Batch, make_example
from zaya_jax.errors import UserError
from zaya_jax.parallel.mesh import batch_sharding, data_mesh
from zaya_jax.plan.compiled.train_program import lower_train_step
from zaya_jax.plan.memory import memory_by_kind
from zaya_jax.plan.rocm.compiler import Memory
from zaya_jax.plan.shares import for_platform, with_execution
from zaya_jax.platform.compiler import compiler_options
from zaya_jax.train.implementations import OPERATIONS
from zaya_jax.train.step.state import TrainState, abstract_state, init_state, make_setup, shardings

DEFAULT = "default"
FORMS = (DEFAULT, "xla", "pallas")
"""Sets of implementations: the defaults of the platform, all of XLA, and all Pallas kernels."""
TOLERANCE = 0.01
"""Largest relative difference of the first step's loss and gradient norm: in bfloat16, rounding decides which
expert some tokens get."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """A measured train step.

    Attributes:
      name: name of the set of implementations.
      implementations: implementation of each operation.
      seconds: time of the step in each round.
      num_bytes: bytes that the program needs on a device.
      estimated_bytes: the same by the arithmetic of `zaya plan`.
      loss: loss of the first step.
      gradient_norm: gradient norm of the first step.
    """

    name: str
    implementations: Mapping[str, str]
    seconds: tuple[float, ...]
    num_bytes: int
    estimated_bytes: int
    loss: float
    gradient_norm: float

    @property
    def median(self) -> float:
        """Median over the rounds, in seconds."""
        return statistics.median(self.seconds)


def default_forms(config: Config) -> list[str]:
    """Returns the sets that differ on this platform; on a CPU, where kernels are interpreted, only one."""
    forms = FORMS[:1] if jax.default_backend() == "cpu" else FORMS
    # On a platform without measurements the default is XLA's code.
    different: dict[tuple[str, ...], str] = {}
    for name in forms:
        different.setdefault(tuple(_implementations(_with_form(config, name)).values()), name)
    return list(different.values())


def measure(
    config: Config, forms: Sequence[str], *, rounds: int, progress: Callable[[str], None] = lambda _: None
) -> list[StepTimes]:
    """Compiles the step with each set of implementations, runs each from the initial weights, and times them
    in turns on one state, which does not depend on the implementation.

    Args:
      config: config of the run, with the batch of this machine.
      forms: names of the sets, of `FORMS`.
      rounds: number of timed steps of each.
      progress: callback that receives what is being done.
    """
    # With all implementations named, so that the estimate of memory is of the same ones.
    configs = {name: _with_form(config, name) for name in forms}
    progress("compiling the steps")
    # XLA releases Python's lock, so that the programs compile at the same time.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = dict(zip(forms, pool.map(_compile, configs.values()), strict=True))
    mesh = data_mesh(
        jax.devices(),
        context_devices=config.execution.context_devices,
        node_devices=config.execution.node_devices,
    )
    batch = jax.device_put(random_batch(config), batch_sharding(mesh))
    progress("first steps")
    # Before any step changes the weights, so that all programs start from the same ones.
    firsts, state = {}, None
    for name, program in programs.items():
        del state  # two states need not fit
        state, firsts[name] = jax.block_until_ready(program(_initial(config, mesh), batch))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        # In turns, so that changes of the clock affect all programs.
        for name, program in programs.items():
            start = time.perf_counter()
            state, _ = jax.block_until_ready(program(state, batch))
            seconds[name].append(time.perf_counter() - start)
    return [
        StepTimes(
            name=name,
            implementations=_implementations(configs[name]),
            seconds=tuple(seconds[name]),
            # As the compiler planned it: the allocator's own numbers would include the ceilings' arrays.
            num_bytes=Memory.of(program).total,
            estimated_bytes=sum(memory_by_kind(configs[name], jax.device_count()).values()),
            loss=float(firsts[name].loss),
            gradient_norm=float(firsts[name].gradient_norm),
        )
        for name, program in programs.items()
    ]


def check_agreement(times: Sequence[StepTimes]) -> None:
    """Checks that the first steps have the same loss and gradient norm, within `TOLERANCE`.

    Raises:
      UserError: if they have not.
    """
    first = times[0]
    for each in times:
        for what in ("loss", "gradient_norm"):
            ours, expected = getattr(each, what), getattr(first, what)
            # Not "greater", because NaN is no agreement.
            if not abs(ours - expected) <= TOLERANCE * abs(expected):
                raise UserError(
                    f"{what} of the first step is {ours:.6g} with {each.name} and {expected:.6g} with "
                    f"{first.name}; they may differ by {TOLERANCE:.0%}: run zaya bench kernels to find the "
                    "operation"
                )


def random_batch(config: Config) -> Batch:
    """Returns random tokens: whole windows without padding, the most work that a batch can have."""
    shape = config.data.batch_size, config.data.sequence_length
    tokens = np.random.default_rng(0).integers(1, config.model.vocab_size, shape)
    return make_example(tokens, delimiters=NO_DELIMITERS)


def _with_form(config: Config, name: str) -> Config:
    """Returns the config with an implementation named for each operation."""
    # An operation whose implementation the config names keeps it.
    chosen = config if name == DEFAULT else with_execution(config, implementation=name)
    return for_platform(chosen, platform_of(jax.devices()[0]))


def _implementations(config: Config) -> dict[str, str]:
    return {operation: getattr(config.execution, field) for field, operation in OPERATIONS.items()}


def _compile(config: Config) -> Any:
    # The function that zaya plan compiles for a cluster: both look at one program.
    return lower_train_step(jax.devices(), config=config).compile()


def _initial(config: Config, mesh: Mesh) -> TrainState:
    setup = make_setup(config, mesh.size)
    # One program, as in a run: the weights are sharded as they are drawn.
    init = jax.jit(
        functools.partial(init_state, config, setup),
        out_shardings=shardings(abstract_state(config, setup, mesh), mesh),
        compiler_options=compiler_options(mesh, once=True),
    )
    return init()

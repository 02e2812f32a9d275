"""Campaigns: the faults of a drill in a seeded order, each with its ground truth, as a JSON file.

A drill is one supervised run. Its steps are divided into windows, one for each trial; every window begins at
a checkpoint and leaves time to recover, so that no trial depends on the ones before it.
"""

import dataclasses
import pathlib
import random
from collections.abc import Sequence

from zaya_jax.aegis.watch.fault_injection import parse_faults
from zaya_jax.errors import UserError
from zaya_jax.fields import build, did_you_mean
from zaya_jax.files import durable
from zaya_jax.files.json_files import dump_json, read_json

WINDOW = 12
"""Number of steps of a trial, and between two checkpoints of the run."""
FIRST_STEPS = 24
"""Number of steps before the first trial; a loss spike is detected only after some losses."""
SPIKE_STEPS = 6
BITS = {"sign": (31, 31), "exponent": (23, 30), "mantissa": (0, 22)}
"""First and last bit of each part of a float32 value."""
FLIPS = {
    "weights": "flip_weight",
    "moments": "flip_moment",
    "gradients": "flip_gradient",
    "inputs": "flip_input",
    "balancing biases": "flip",
}
"""Faults that flip a bit, by what they change."""
_ANY = "@step={step}:process={process}"
_DAMAGE = "@step={step}:process=0,kill@step={next}:process={process}"
KINDS: dict[str, str] = {
    # Ends of a process, by a signal or by an error. Process 0 also ends the service that all others use.
    "kill": f"kill{_ANY}",
    "kill of the first": "kill@step={step}:process=0",
    "segmentation fault": f"segfault{_ANY}",
    "abort": f"abort{_ANY}",
    "out of memory": f"exhaust{_ANY}",
    "SIGTERM": f"terminate{_ANY}",
    "exception": f"fail{_ANY}",
    "exception in a thread": f"fail_thread{_ANY}",
    # Processes that neither end nor continue.
    "SIGSTOP": f"pause{_ANY}",
    "hang": f"hang{_ANY}",
    "hang with lock": f"lock{_ANY}",
    "network partition": "partition@step={step}:process={other}",
    "damaged messages": "damage@step={step}:process={other}",
    # Values that are wrong where only one device has them.
    **{
        f"flip in {what}: {part}": f"{kind}{_ANY}:bit={{{part}}}"
        for what, kind in FLIPS.items()
        for part in BITS
    },
    "stale batch": f"stale{_ANY}",
    "dropped batch": f"lost{_ANY}",
    "reordered batches": f"reorder{_ANY}",
    # The kill makes the run read the checkpoint.
    "flip in checkpoint": f"corrupt{_DAMAGE}",
    "truncated checkpoint": f"truncate{_DAMAGE}",
    "missing file of checkpoint": f"remove{_DAMAGE}",
    # More than one fault before the run has recovered.
    "node that fails until replaced": f"kill{_ANY}:stays",
    "two kills at once": f"kill{_ANY},kill@step={{step}}:process={{second}}",
    "kill during recovery": f"kill{_ANY},kill_restore@step={{begin}}:process={{second}}",
    # Long enough for the checks in a row after which a process is named.
    "slowness": "slow@step={early}:process={process}:percent=60:steps=9",
    "NaN": f"nan{_ANY}",
    "loss spike": f"spike@step={{step}}:steps={SPIKE_STEPS}",
}
"""Faults of each kind of trial, with placeholders."""
COURSE_CHANGING = ("NaN", "loss spike")
"""Kinds after which a run cannot be equal to an undisturbed one: it skips a step, or batches."""
_LAST = ("slowness", *COURSE_CHANGING)
"""Kinds at the end of a campaign. A slowness would occur again when later trials repeat its steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultTrial:
    """A trial of a drill.

    Attributes:
      kind: name of the kind, under which results are summarized.
      step: step of the first fault.
      faults: faults in the words of `ZAYA_FAULT`: kind, step, process, and bit or percentage of each.
    """

    kind: str
    step: int
    faults: str

    def __post_init__(self):
        if not self.faults or parse_faults(self.faults)[0].step != self.step:
            raise UserError(
                f'the trial "{self.kind}" has step {self.step} and faults "{self.faults}"; the first fault '
                "must be at that step"
            )

    @property
    def begin(self) -> int:
        """Step of the checkpoint at which the window begins."""
        # A fault at the step of a checkpoint still belongs to the window that ends with it.
        return (self.step - 1) // WINDOW * WINDOW


@dataclasses.dataclass(frozen=True, kw_only=True)
class Campaign:
    """The trials of a drill.

    Attributes:
      processes: number of processes of the run, with one device each.
      trials: trials by ascending step, each in its own window.
      seed: seed of the order, the processes, the steps and the bits; None for a written campaign.
    """

    processes: int
    trials: tuple[FaultTrial, ...]
    seed: int | None = None

    def __post_init__(self):
        if self.processes < 2:
            raise UserError(f"processes is {self.processes}; a drill needs 2 or more, to name one of them")
        # Two faults in one window would be noticed together, and neither could be scored.
        begins = [trial.begin for trial in self.trials]
        if not begins or begins[0] < FIRST_STEPS or sorted(set(begins)) != begins:
            raise UserError(
                f"the trials have windows from the steps {begins}; there must be one or more, from step "
                f"{FIRST_STEPS} on, in different windows of {WINDOW} steps, and ascending"
            )

    @property
    def num_steps(self) -> int:
        """Number of steps of the run, with a window after the last trial."""
        return self.trials[-1].begin + 2 * WINDOW

    @property
    def faults(self) -> str:
        """All faults, as the value of `ZAYA_FAULT`."""
        return ",".join(trial.faults for trial in self.trials)


def plan_campaign(seed: int, *, processes: int, rounds: int, kinds: Sequence[str] = ()) -> Campaign:
    """Plans rounds of all kinds, in a random order; kinds that change the course of the run come last.

    Args:
      seed: seed of order, steps, processes and bits.
      processes: number of processes of the run.
      rounds: number of trials of each kind.
      kinds: kinds of trials; empty for all.

    Raises:
      UserError: for an unknown kind, or fewer than 2 processes.
    """
    for kind in kinds:
        if kind not in KINDS:
            hint = did_you_mean(kind, KINDS) or f"known are {', '.join(KINDS)}"
            raise UserError(f'unknown kind of trial "{kind}"; {hint}')
    if processes < 2:
        raise UserError(f"processes is {processes}; a drill needs 2 or more, to name one of them")
    generator, chosen = random.Random(seed), [kind for kind in KINDS if kind in (kinds or KINDS)]
    # Each round has another order, so that a kind follows different ones.
    several = [
        kind for _ in range(rounds) for kind in generator.sample(chosen, len(chosen)) if kind not in _LAST
    ]
    order = several + [kind for kind in _LAST if kind in chosen for _ in range(rounds)]
    begins = range(FIRST_STEPS, FIRST_STEPS + len(order) * WINDOW, WINDOW)
    trials = (_plan(kind, begin, processes, generator) for kind, begin in zip(order, begins, strict=True))
    return Campaign(processes=processes, trials=tuple(trials), seed=seed)


def _plan(kind: str, begin: int, processes: int, generator: random.Random) -> FaultTrial:
    # In the middle of a window: a damaged checkpoint is still the newest one at the restart.
    step = begin + generator.randint(WINDOW // 3, WINDOW // 2 + 1)
    process, second = generator.sample(range(processes), 2)
    # Process 0 has the coordinator, from which only others can be cut off.
    values = {
        "step": step,
        "next": step + 1,
        "early": begin + 2,
        "begin": begin,
        "process": process,
        "second": second,
        "other": generator.randrange(1, processes),
    }
    # Drawn for every kind, so that a campaign of other kinds has the same order of draws.
    bits = {part: generator.randint(*limits) for part, limits in BITS.items()}
    faults = KINDS[kind].format(**values, **bits)
    return FaultTrial(kind=kind, step=parse_faults(faults)[0].step, faults=faults)


def read_campaign(file: pathlib.Path) -> Campaign:
    """Reads a campaign.

    Raises:
      UserError: if the file is not a valid campaign.
    """
    try:
        return build(Campaign, read_json(file), "")
    except UserError as error:
        raise UserError(f"{file} is not a campaign: {error}") from error


def write_campaign(campaign: Campaign, file: pathlib.Path) -> None:
    """Writes a campaign, which `zaya aegis drill --campaign=FILE` repeats."""
    durable.write(file, dump_json(dataclasses.asdict(campaign), indent=1) + "\n")

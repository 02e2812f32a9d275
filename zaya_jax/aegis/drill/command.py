"""`zaya aegis drill`: runs a drill on this machine, and prints its score."""

import contextlib
import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from zaya_jax.aegis.agent.sightings import read_sightings
from zaya_jax.aegis.drill.campaign import KINDS, Campaign, plan_campaign, read_campaign, write_campaign
from zaya_jax.aegis.drill.noise import busy_machine, slow_steps
from zaya_jax.aegis.drill.runs import final_is_equal, run, score_run
from zaya_jax.aegis.drill.scoring import Outcome, find_alarms, median_parts
from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.files.json_files import dump_json
from zaya_jax.options import Parser, check_at_least
from zaya_jax.run_folder.events import events_of
from zaya_jax.text_tables import dense_table, name_column, number_column

CONTROL, RUN = "control", "run"
MIN_NAMED = 0.95
"""Share of trials that must be named rightly in a drill that passes."""
CAMPAIGN_FILE, RESULT_FILE = "campaign.json", "result.json"


@dataclasses.dataclass(frozen=True)
class Score:
    """Score of a drill.

    Attributes:
      campaign: the trials.
      outcomes: results of the trials that occurred.
      alarms: false alarms of the run without faults, which is as long.
      codes: exit codes of the supervisor in the run without faults and in the one with them.
      final_is_equal: whether both have the same final weights; None if a fault has changed the course.
    """

    campaign: Campaign
    outcomes: tuple[Outcome, ...]
    alarms: tuple[str, ...]
    codes: tuple[int, int]
    final_is_equal: bool | None

    @property
    def is_passed(self) -> bool:
        """Whether all faults occurred, were noticed, named and survived, without a false alarm."""
        # A run that has ended early skips the trials after its end, which is no success.
        complete = len(self.outcomes) == len(self.campaign.trials) and self.codes == (0, 0)
        sound = all(each.is_noticed and each.is_equal is not False for each in self.outcomes)
        named = sum(each.is_named for each in self.outcomes) >= MIN_NAMED * len(self.outcomes)
        return complete and sound and named and not self.alarms and self.final_is_equal is not False


def main(argv: Sequence[str]) -> None:
    """Runs `zaya aegis drill`; exits with 3 unless the score passes.

    Raises:
      UserError: for an invalid campaign, or a folder that is not empty.
    """
    options = _parser().parse_args(argv)
    check_at_least(options, rounds=1)
    if options.folder.exists() and any(options.folder.iterdir()):
        raise UserError(f"{options.folder} is not empty; a drill needs an empty or new --folder")
    if options.campaign is not None:
        campaign = read_campaign(options.campaign)
    else:
        kinds = [kind.strip() for kind in options.kinds.split(",")] if options.kinds else ()
        campaign = plan_campaign(
            options.seed, processes=options.processes, rounds=options.rounds, kinds=kinds
        )
    score = run_drill(options.folder, campaign, noise=options.noise)
    text = dump_json(score_json(score), indent=1)
    # Also where the tables are printed: they omit what each trial reported.
    durable.write(options.folder / RESULT_FILE, text + "\n")
    if options.json:
        print(text)
    else:
        # Names of kinds may contain brackets, which rich would take for markup.
        Console(soft_wrap=True, highlight=False, markup=False).print(*score_tables(score), sep="\n")
    if not score.is_passed:
        sys.exit(3)


def _parser() -> Parser:
    parser = Parser(
        "aegis drill",
        "Train a small model under a supervisor twice, first undisturbed and then with faults of every kind, "
        "and score what was noticed, named rightly and recovered bit for bit.",
        (
            "zaya aegis drill                                     # every kind once",
            'zaya aegis drill --kinds="hang, SIGSTOP" --rounds=5 --folder=runs/hangs',
            "zaya aegis drill --campaign=runs/drill/campaign.json --folder=runs/again",
        ),
    )
    parser.add_argument("--processes", default=4, help="number of processes, each on its own virtual node")
    parser.add_argument(
        "--seed", default=0, help="seed of the order, steps, processes and bits of the faults"
    )
    parser.add_argument("--rounds", default=1, help="number of trials of each kind")
    parser.add_argument(
        "--kinds", metavar="KIND,...", help=f"kinds of trials (default: all): {', '.join(KINDS)}"
    )
    parser.add_argument(
        "--campaign",
        type=pathlib.Path,
        metavar="FILE",
        help="JSON file of trials, as a drill writes it to its folder; instead of the options above",
    )
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=pathlib.Path("runs/drill"),
        metavar="FOLDER",
        help="new or empty folder of the drill",
    )
    parser.add_argument(
        "--noise", action="store_true", help="slow steps, a slow disk and busy cores in the undisturbed run"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run_drill(folder: pathlib.Path, campaign: Campaign, *, noise: bool = False) -> Score:
    """Runs a campaign and scores it.

    Args:
      folder: folder of the drill, which contains both runs.
      campaign: the trials.
      noise: whether the run without faults is disturbed as by other users of the machine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_campaign(campaign, folder / CAMPAIGN_FILE)
    control, own = folder / CONTROL, folder / RUN
    # One after the other: they would take the cores from each other, and a recovery would take longer.
    with busy_machine(folder) if noise else contextlib.nullcontext():
        first = run(control, campaign, slow_steps(campaign) if noise else "")
    second = run(own, campaign, campaign.faults)
    outcomes = score_run(own, control, campaign)
    alarms = find_alarms(events_of(control), read_sightings(control))
    # An incomplete run has no final checkpoint to compare.
    is_complete = first == second == 0
    is_equal = final_is_equal(own, control, campaign) if is_complete else None
    return Score(campaign, tuple(outcomes), tuple(alarms), (first, second), is_equal)


def score_tables(score: Score) -> list[Any]:
    """Returns a score as tables and text."""
    blocks: list[Any] = [_kinds_table(score)]
    blocks += [
        f"{o.trial.kind} at step {o.trial.step}: {_mistake(o)}" for o in score.outcomes if not o.is_named
    ]
    if parts := median_parts(score.outcomes):
        table = Table(name_column("phase of a recovery"), number_column("median seconds"))
        for name, seconds in parts.items():
            table.add_row(name, f"{seconds:.1f}")
        blocks.append(table)
    alarms = "\n  ".join(score.alarms)
    blocks.append(
        f"false alarms of the undisturbed run: {len(score.alarms)}" + (f"\n  {alarms}" if alarms else "")
    )
    blocks.append(f"exit codes of the undisturbed and the disturbed run: {score.codes[0]}, {score.codes[1]}")
    if score.final_is_equal is not None:
        blocks.append(f"final weights of both: {'equal' if score.final_is_equal else 'different'}")
    return blocks


def _mistake(outcome: Outcome) -> str:
    texts = (", ".join(map(str, sorted(each))) or "nothing" for each in (outcome.reported, outcome.truth))
    return "reported {}, true is {}".format(*texts)


def _kinds_table(score: Score) -> Table:
    headers = ("trials", "noticed", "named", "lost steps", "median s", "worst s", "equal")
    table = dense_table("fault", *headers)
    # Kinds without an outcome too, so that a trial which did not occur is seen.
    by_kind = {kind: [o for o in score.outcomes if o.trial.kind == kind] for kind in _kinds(score.campaign)}
    for kind, outcomes in [*by_kind.items(), ("all", list(score.outcomes))]:
        table.add_row(kind, *_cells(outcomes))
    missing = len(score.campaign.trials) - len(score.outcomes)
    table.caption = f"{missing} trials did not occur: the run ended before" if missing else None
    return table


def _kinds(campaign: Campaign) -> list[str]:
    # Those of this program in its order, and then others of a written campaign.
    used = dict.fromkeys(trial.kind for trial in campaign.trials)
    return [kind for kind in [*KINDS, *(used.keys() - KINDS.keys())] if kind in used]


def _cells(outcomes: Sequence[Outcome]) -> list[str]:
    values = summary(outcomes)
    equal = f"{values['equal']} of {values['comparable']}" if values["comparable"] else ""
    seconds = [
        f"{values[name]:.1f}" if name in values else "" for name in ("median_seconds", "worst_seconds")
    ]
    return [*(str(values[name]) for name in ("trials", "noticed", "named", "lost_steps")), *seconds, equal]


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns the counts of some outcomes, and the times of those with a restart or a rollback."""
    # Without those that needed no restart, whose time would be 0.
    totals = [each.total for each in outcomes if each.seconds]
    compared = [each.is_equal for each in outcomes if each.is_equal is not None]
    times = {"median_seconds": statistics.median(totals), "worst_seconds": max(totals)} if totals else {}
    return {
        "trials": len(outcomes),
        "noticed": sum(each.is_noticed for each in outcomes),
        "named": sum(each.is_named for each in outcomes),
        "lost_steps": max((each.lost_steps for each in outcomes), default=0),
        "comparable": len(compared),
        "equal": sum(compared),
    } | times


def score_json(score: Score) -> dict[str, Any]:
    """Returns a score as JSON values."""
    kinds = {
        kind: summary([each for each in score.outcomes if each.trial.kind == kind])
        for kind in _kinds(score.campaign)
    }
    return {
        "seed": score.campaign.seed,
        "trials": [_outcome_json(each) for each in score.outcomes],
        "planned": len(score.campaign.trials),
        "kinds": kinds,
        "all": summary(score.outcomes),
        "false_alarms": list(score.alarms),
        "exit_codes": list(score.codes),
        "final_is_equal": score.final_is_equal,
        "median_seconds_of_parts": median_parts(score.outcomes),
        "passed": score.is_passed,
    }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return dataclasses.asdict(outcome.trial) | {
        "true": sorted(map(str, outcome.truth)),
        "reported": sorted(map(str, outcome.reported)),
        "noticed": outcome.is_noticed,
        "named": outcome.is_named,
        "lost_steps": outcome.lost_steps,
        "seconds": dict(outcome.seconds),
        "total_seconds": outcome.total,
        "equal": outcome.is_equal,
    }

"""`zaya supervise`: a run that is begun anew, elsewhere or later, until it has all its steps.

It stands beside `train_command.py`, whose words it is given.
"""

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from zaya_jax.aegis.deciding import RestartPolicy
from zaya_jax.aegis.engines import LocalEngine, RunEngine, SlurmEngine
from zaya_jax.aegis.rules import RULES_FILE, load_rules
from zaya_jax.aegis.supervisor import Supervision, Supervisor
from zaya_jax.options import Parser
from zaya_jax.parallel.launch import GRACE_SECONDS, Launch
from zaya_jax.train_command import config_of

ENGINES = ("local", "slurm")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya supervise` with the words behind it, and leaves with the exit code of the last attempt.

    Raises:
      ValueError: for numbers that cannot be, or no `train` behind "--".
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    border = argv.index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:border])
    command = argv[border + 1 :]
    if not command or command[0] != "train":
        raise ValueError('there is no run to supervise; it stands behind "--": zaya supervise -- train')
    _check(options)
    policy = RestartPolicy(nodes=options.nodes, least_nodes=options.least_nodes or options.nodes)
    run_folder = config_of(command[1:]).run_folder
    given = Supervision(run_folder, load_rules(options.rules), policy, dry_run=options.dry_run)
    supervisor = Supervisor(_engine(options, command), given, say=_say)

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        supervisor.ask_to_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    if code := supervisor.keep_going():
        sys.exit(code)


def _parser() -> Parser:
    parser = Parser(
        "supervise",
        "Keeps a run going: begins its processes, sees how they end, and begins them anew, later, or without "
        "a node, as the cause asks for. A webhook in ZAYA_WEBHOOK is told what needs a human.",
        (
            "zaya supervise --processes=4 --devices=1 -- train --config.run_folder=runs/four",
            "zaya supervise --engine=slurm --nodes=16 -- train --config=configs/zaya1_8b.py",
            "zaya supervise --dry-run -- train",
        ),
    )
    parser.add_argument(
        "--engine", choices=ENGINES, default="local", help="where: this machine, or the nodes of a SLURM job"
    )
    parser.add_argument("--processes", type=int, default=2, help="local: how many, 2 by default")
    parser.add_argument("--devices", type=int, help="local: of each process, as `zaya launch` has it")
    parser.add_argument(
        "--nodes", type=int, default=1, help="slurm: that an attempt uses; the others of the job are spare"
    )
    parser.add_argument(
        "--least-nodes", type=int, help="slurm: with fewer the run does not go on (default: --nodes)"
    )
    parser.add_argument("--rules", default=RULES_FILE, metavar="FILE", help="TOML (default: %(default)s)")
    parser.add_argument(
        "--dry-run", action="store_true", help="one attempt, behind which it is told what would be done"
    )
    return parser


def _check(options) -> None:
    for name in ("processes", "devices", "nodes", "least_nodes"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be 1 or above")
    if options.least_nodes is not None and options.least_nodes > options.nodes:
        raise ValueError(
            f"--least-nodes is {options.least_nodes}; it must be --nodes, {options.nodes}, or below"
        )


def _engine(options, command: Sequence[str]) -> RunEngine:
    words = [sys.executable, "-m", "zaya_jax.cli", *command]
    if options.engine == "local":
        return LocalEngine(Launch(words, options.processes, options.devices, GRACE_SECONDS), options.rules)
    return SlurmEngine(words, options.rules)


def _say(line: str) -> None:
    print(f"supervise: {line}", file=sys.stderr, flush=True)

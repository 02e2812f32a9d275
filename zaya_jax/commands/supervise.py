"""`zaya supervise`: runs training to completion, restarting it after failures."""

import sys
from collections.abc import Sequence

from zaya_jax.aegis.agent.log_rules import RULES_FILE, load_rules
from zaya_jax.aegis.supervisor.engines import LocalEngine, RunEngine, SlurmEngine
from zaya_jax.aegis.supervisor.restart_policy import RestartPolicy
from zaya_jax.aegis.supervisor.supervisor import Supervisor
from zaya_jax.commands.train import config_of
from zaya_jax.errors import UserError
from zaya_jax.options import Parser, check_at_least
from zaya_jax.parallel.processes.launch import GRACE_SECONDS, Launch
from zaya_jax.platform.stop_signals import on_stop_signals

ENGINES = ("local", "slurm")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya supervise` with its arguments, and exits with the exit code of the last attempt.

    Raises:
      UserError: for invalid numbers, or if "--" is not followed by `train`.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # Everything after "--" is the supervised command, with its own options.
    separator = argv.index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:separator])
    command = argv[separator + 1 :]
    # Other commands cannot continue where a failed attempt has ended.
    if not command or command[0] != "train":
        raise UserError('no run to supervise; give its command after "--": zaya supervise -- train')
    _check(options)
    # Each process has its own virtual node.
    nodes = options.nodes if options.virtual_nodes is None else options.processes
    policy = RestartPolicy(nodes=nodes, min_nodes=options.min_nodes or nodes)
    # The supervisor reads events and checkpoints of the run, so that it needs its folder.
    run_folder = config_of(command[1:]).run_folder
    # A wrong file of rules is an error here, before any process is started.
    rules = load_rules(options.rules)
    engine = _engine(options, command)
    supervisor = Supervisor(engine, run_folder, rules, policy, dry_run=options.dry_run, report=_report)

    # Before the first attempt: from here on a signal lets the run save its state.
    with on_stop_signals(lambda _: supervisor.request_stop()):
        code = supervisor.run()
    if code:
        sys.exit(code)


def _parser() -> Parser:
    parser = Parser(
        "supervise",
        "Run training to completion, restarting it after failures: at once, after a pause, or without a "
        "failing node, depending on the cause. If a human is needed, the webhook in ZAYA_WEBHOOK is called.",
        (
            "zaya supervise --processes=4 --devices=1 -- train --config.run_folder=runs/four",
            "zaya supervise --engine=slurm --nodes=16 -- train --config=configs/zaya1_8b.py",
            "zaya supervise --dry-run -- train",
        ),
    )
    # argparse does not know the command after "--", and would omit it.
    parser.usage = "zaya supervise [options] -- train [options of zaya train]"
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="local",
        help="run on this machine, or on the nodes of a SLURM job",
    )
    parser.add_argument("--processes", default=2, help="local: number of processes")
    parser.add_argument("--devices", type=int, help="local: devices per process, as in `zaya launch`")
    parser.add_argument(
        "--virtual-nodes",
        type=int,
        metavar="N",
        help="local: treat each process as a node with its own name, and the rest of N names as spare nodes, "
        "to rehearse how failing nodes are excluded",
    )
    parser.add_argument(
        "--nodes", default=1, help="slurm: nodes per attempt; the job's other nodes are spare"
    )
    parser.add_argument(
        "--min-nodes", type=int, help="slurm: minimum number of nodes to continue with (default: --nodes)"
    )
    parser.add_argument("--rules", default=RULES_FILE, metavar="FILE", help="TOML file of log rules")
    parser.add_argument(
        "--dry-run", action="store_true", help="run one attempt, and only print what would be done after it"
    )
    return parser


def _check(options) -> None:
    check_at_least(options, processes=1, devices=1, nodes=1, min_nodes=1, virtual_nodes=options.processes)
    if options.virtual_nodes is not None and options.engine != "local":
        raise UserError("--virtual-nodes goes with --engine=local; SLURM has its nodes")
    if options.min_nodes is not None and options.min_nodes > options.nodes:
        raise UserError(f"--min-nodes is {options.min_nodes}; it must be at most --nodes, {options.nodes}")


def _engine(options, command: Sequence[str]) -> RunEngine:
    # The same Python and the same checkout, whatever "zaya" on PATH is.
    words = [sys.executable, "-m", "zaya_jax.cli", *command]
    if options.engine == "local":
        program = Launch(words, options.processes, options.devices, GRACE_SECONDS)
        return LocalEngine(program, options.rules, options.virtual_nodes)
    return SlurmEngine(words, options.rules)


def _report(line: str) -> None:
    print(f"supervise: {line}", file=sys.stderr, flush=True)

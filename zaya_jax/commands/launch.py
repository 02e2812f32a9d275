"""`zaya launch`: runs a command in several processes on this machine."""

import sys
from collections.abc import Sequence

from zaya_jax.errors import DAMAGED, INTERRUPTED, RESUMABLE, USER_ERROR, UserError
from zaya_jax.options import Parser, check_at_least
from zaya_jax.parallel.processes.launch import GRACE_SECONDS, Launch, launch

FINAL = (0, USER_ERROR, DAMAGED, RESUMABLE, INTERRUPTED)
"""Exit codes after which a restart would change nothing, or is up to the caller."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya launch`, and exits with the exit code of the first process that failed.

    Args:
      argv: arguments after "launch"; None for those of the process.

    Raises:
      UserError: for invalid numbers, or if there is no command after "--".
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # Options before "--" belong to launch, those after it to the command.
    separator = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(
        "launch",
        "Run a command in several processes on this machine, as srun and Kubernetes do on several machines.",
        (
            "zaya launch --processes=4 -- train --config.run_folder=runs/four",
            "zaya launch --processes=2 --devices=4 -- train --config=configs/tiny.py",
            "zaya launch --processes=8 --devices=1 --max-restarts=3 -- train",
        ),
    )
    # argparse does not know the command after "--", and would omit it.
    parser.usage = "zaya launch [options] -- COMMAND [options of the command]"
    parser.add_argument("--processes", default=2, help="number of processes")
    parser.add_argument(
        "--devices",
        type=int,
        help="number of CPU devices or GPUs of each process (default: all that jax finds)",
    )
    parser.add_argument("--max-restarts", default=0, help="maximum number of restarts after a crash")
    parser.add_argument(
        "--grace-seconds",
        default=GRACE_SECONDS,
        help="time for the other processes to exit after one failed, in seconds (default: %(default)g)",
    )
    options = parser.parse_args(argv[:separator])
    check_at_least(options, processes=1, devices=1, max_restarts=0, grace_seconds=0)
    command = argv[separator + 1 :]
    if not command:
        raise UserError('no command to launch; add it after "--": zaya launch -- train')
    # Start the same Python and the same checkout, whatever "zaya" on PATH is.
    arguments = [sys.executable, "-m", "zaya_jax.cli", *command]
    processes = Launch(arguments, options.processes, options.devices, options.grace_seconds)
    code = launch(processes, restarts=options.max_restarts, final=FINAL)
    if code:
        sys.exit(code)

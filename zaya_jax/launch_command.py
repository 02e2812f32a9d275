"""`zaya launch`: a verb in several processes of this machine.

It stands beside `cli.py`, whose exit codes it goes by.
"""

import sys
from collections.abc import Sequence

from zaya_jax.options import Parser
from zaya_jax.parallel.launch import GRACE_SECONDS, Launch, launch

FINAL = (0, 2, 65, 75, 130)
"""Exit codes behind which beginning anew would change nothing, or is for others to do."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya launch` with the words behind it, and leaves with the exit code of the first that failed.

    Raises:
      ValueError: for numbers that cannot be, or no verb behind "--".
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    border = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(
        "launch",
        "Runs a verb in several processes of this machine, as srun and Kubernetes do on many.",
        (
            "zaya launch --processes=4 -- train --config.run_folder=runs/four",
            "zaya launch --processes=2 --devices=4 -- train --config=configs/tiny.py",
            "zaya launch --processes=8 --devices=1 --restarts=3 -- train",
        ),
    )
    parser.add_argument("--processes", type=int, default=2, help="how many, 2 by default")
    parser.add_argument(
        "--devices", type=int, help="of each process: CPU devices to make, or its share of the GPUs"
    )
    parser.add_argument(
        "--restarts", type=int, default=0, help="how often all begin anew when one has crashed, 0 by default"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=GRACE_SECONDS,
        help=f"seconds that the others have to leave behind one that failed, {GRACE_SECONDS:.0f} by default",
    )
    options = parser.parse_args(argv[:border])
    for name, least in (("processes", 1), ("devices", 1), ("restarts", 0), ("grace", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} is {value}; it must be {least} or above")
    command = argv[border + 1 :]
    if not command:
        raise ValueError('there is no verb to launch; it stands behind "--": zaya launch -- train')
    words = [sys.executable, "-m", "zaya_jax.cli", *command]
    given = Launch(words, options.processes, options.devices, options.grace)
    code = launch(given, restarts=options.restarts, final=FINAL)
    if code:
        sys.exit(code)

"""`zaya plan`."""

from collections.abc import Sequence

from zaya_jax.options import Parser
from zaya_jax.plan.rocm.wheels import install


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya plan`."""
    parser = Parser(
        "plan",
        "rocm-wheels: installs the compiler for AMD GPUs, in a folder of its own.",
        ("zaya plan rocm-wheels",),
    )
    parser.add_argument("what", choices=("rocm-wheels",), help="what to do")
    parser.parse_args(argv)
    print(f"the compiler for AMD GPUs is in {install()}")

"""`python -m zaya_jax.site OUT` builds the documentation website."""

import argparse
import importlib.util
import pathlib
import sys

from zaya_jax.errors import UserError
from zaya_jax.platform.shell import install_command

NEEDS = ("sphinx", "myst_nb", "furo", "jupytext")


def main(argv: list[str] | None = None) -> None:
    """Builds the website, or exits with a sentence that says what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m zaya_jax.site", description="Build the documentation website."
    )
    parser.add_argument("out", type=pathlib.Path, help="output folder; open its index.html")
    parser.add_argument("--run-notebooks", action="store_true", help="execute the notebooks; takes minutes")
    parser.add_argument(
        "--executed",
        type=pathlib.Path,
        metavar="FOLDER",
        help="folder of executed notebooks (NAME.ipynb)",
    )
    options = parser.parse_args(argv)
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"the website needs {', '.join(missing)}; {install_command('docs')}")
    from zaya_jax.site.build import build

    try:
        build(options.out, executed=options.executed, run_notebooks=options.run_notebooks)
    except UserError as error:
        sys.exit(str(error))
    print(f"{options.out / 'index.html'}")


if __name__ == "__main__":
    main()

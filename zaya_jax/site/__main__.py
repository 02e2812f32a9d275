"""`python -m zaya_jax.site OUT` builds the documentation."""

import argparse
import importlib.util
import pathlib
import sys

from zaya_jax.site.build import build

NEEDS = ("sphinx", "myst_parser", "furo", "jupytext")


def main(argv: list[str] | None = None) -> None:
    """Builds the site, or says in a sentence what is in the way."""
    parser = argparse.ArgumentParser(prog="python -m zaya_jax.site", description="Builds the documentation.")
    parser.add_argument(
        "out", type=pathlib.Path, help="the folder to build it in; index.html is its beginning"
    )
    parser.add_argument("--run-notebooks", action="store_true", help="show their outputs; takes minutes")
    parser.add_argument(
        "--executed", type=pathlib.Path, metavar="FOLDER", help="of notebooks that were run, NAME.ipynb each"
    )
    options = parser.parse_args(argv)
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"the site needs {', '.join(missing)}; pip install 'zaya_jax[docs]'")
    try:
        build(options.out, executed=options.executed, run_notebooks=options.run_notebooks)
    except ValueError as error:
        sys.exit(str(error))
    print(f"{options.out / 'index.html'}")


if __name__ == "__main__":
    main()

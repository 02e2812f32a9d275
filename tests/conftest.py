"""Checks every annotation of shape and dtype at run time, in all tests.

The hook rewrites modules as they are imported, so nothing of ours may be imported before it.
"""

import sys

import jaxtyping

PACKAGES = ["zaya_jax", "pallas_kernels"]

_early = sorted(name for name in sys.modules if name.partition(".")[0] in PACKAGES)
if _early:
    raise ImportError(f"{_early} were imported before the hook that checks their annotations")
jaxtyping.install_import_hook(PACKAGES, "beartype.beartype")

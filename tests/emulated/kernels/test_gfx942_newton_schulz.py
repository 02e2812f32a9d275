"""`test_newton_schulz` on gfx942 machine code."""

from kernel_tests import names_in

WITHOUT = (
    # Tests that launch no kernel.
    "test_errors",
    "test_no_matrices_and_no_steps",
)

globals().update(names_in("test_newton_schulz", without=WITHOUT))

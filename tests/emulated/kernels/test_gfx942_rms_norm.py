"""`test_rms_norm` on gfx942 machine code."""

from kernel_tests import names_in

WITHOUT = (
    # Tests that launch no kernel.
    "test_errors",
    "test_no_rows",
    "test_wrong_dtypes",
)

globals().update(names_in("test_rms_norm", without=WITHOUT))

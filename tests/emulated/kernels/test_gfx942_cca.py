"""`test_cca` on gfx942 machine code."""

from kernel_tests import names_in

WITHOUT = (
    # Tests that launch no kernel.
    "test_the_default_is_that_of_the_platform",
    "test_errors",
    "test_no_tokens",
    "test_wrong_dtypes",
)

globals().update(names_in("test_cca", without=WITHOUT))

"""`test_cross_entropy` on gfx942 machine code."""

from kernel_tests import names_in

WITHOUT = (
    # Tests that launch no kernel.
    "test_the_default_is_that_of_the_platform",
    "test_a_logsumexp_in_one_pass",
    "test_a_logsumexp_of_nan_is_nan",
    "test_errors",
    "test_no_array_of_rows_times_vocabulary",
    "test_no_rows",
)

globals().update(names_in("test_cross_entropy", without=WITHOUT))

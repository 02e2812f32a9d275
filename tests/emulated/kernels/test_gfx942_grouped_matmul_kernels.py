"""`test_grouped_matmul_kernels` on gfx942 machine code."""

from kernel_tests import names_in

WITHOUT = (
    "test_an_implementation_for_each_direction",  # looks for the Pallas call, which the emulator replaces
    # Tests that launch no kernel.
    "test_errors",
    "test_empty_arguments",
    "test_the_vendor_package_gets_the_arguments_that_it_supports",
)

globals().update(names_in("test_grouped_matmul_kernels", without=WITHOUT))

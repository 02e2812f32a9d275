"""`test_grouped_matmul_kernels` on gfx942 machine code."""

from kernel_tests import names_in

WITHOUT = (
    "test_a_form_for_each_direction",  # looks for the Pallas call, which the emulator replaces
    # Tests that launch no kernel.
    "test_errors",
    "test_nothing",
    "test_the_vendor_s_package_is_asked_for_what_it_takes",
)

globals().update(names_in("test_grouped_matmul_kernels", without=WITHOUT))

"""`test_grouped_matmul_kernels` on gfx942 machine code."""

from kernel_tests import names_in

WITHOUT = (
    # They look for the Pallas call, which the emulator replaces.
    "test_a_result_that_is_computed_again_has_separate_backward_passes",
    "test_an_implementation_for_each_direction",
    "test_kernels_of_few_rows_have_other_names",
    # Tests that launch no kernel.
    "test_errors",
    "test_gate_and_up_must_have_the_width_of_the_second_product",
    "test_empty_arguments",
    "test_the_vendor_package_gets_the_arguments_that_it_supports",
)

globals().update(names_in("test_grouped_matmul_kernels", without=WITHOUT))

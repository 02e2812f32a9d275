"""`test_backend` on gfx942 machine code."""

from kernel_tests import names_in

WITHOUT = (
    # Tests that launch no kernel.
    "test_a_launch_hides_only_the_deprecation_warning",
    "test_a_mask_of_rows_alone_covers_the_block",
    "test_one_file_names_the_backend",
    "test_invalid_settings_are_named",
    "test_the_advice_points_to_an_existing_section",
    "test_a_missing_backend_fails_with_advice",
    "test_a_final_deprecation_fails_with_advice",
    "test_this_jax_compiles_kernels_with_triton",
    "test_valid_mask",
    "test_without_the_backend_kernels_raise_an_error_and_the_rest_runs",
)

globals().update(names_in("test_backend", without=WITHOUT))

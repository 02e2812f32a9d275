"""`test_backend` on gfx942 machine code."""

from kernel_tests import names_in

WITHOUT = (
    # Tests that launch no kernel.
    "test_a_launch_hides_the_deprecation_and_no_other",
    "test_a_mask_of_rows_alone_covers_the_block",
    "test_one_file_names_the_backend",
    "test_settings_are_refused_by_name",
    "test_the_advice_points_at_a_section_that_is_there",
    "test_the_canary_falls_with_advice_when_the_backend_is_gone",
    "test_the_canary_falls_with_advice_when_the_deprecation_is_final",
    "test_this_jax_compiles_kernels_by_triton",
    "test_which_exist",
    "test_without_the_backend_kernels_refuse_in_a_sentence_and_the_rest_runs",
)

globals().update(names_in("test_backend", without=WITHOUT))

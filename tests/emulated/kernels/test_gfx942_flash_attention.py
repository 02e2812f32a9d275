"""`test_flash_attention` on gfx942 machine code."""

from kernel_tests import names_in

WITHOUT = (
    # Tests that launch no kernel.
    "test_a_causal_sequence_uses_all_of_an_mi300x",
    "test_the_default_is_that_of_the_platform",
    "test_dtypes_must_agree",
    "test_errors",
    "test_no_keys_and_no_queries",
    "test_spans_contain_all_visible_blocks_and_only_whole_blocks_skip_the_mask",
    "test_the_whole_blocks_of_a_causal_mask_need_no_mask",
)

globals().update(names_in("test_flash_attention", without=WITHOUT))

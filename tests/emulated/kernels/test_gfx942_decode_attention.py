"""`test_decode_attention` on gfx942 machine code."""

from kernel_tests import names_in

WITHOUT = (
    # Tests that launch no kernel.
    "test_the_default_is_that_of_the_platform",
    "test_a_ring_is_what_was_written_into_it",
    "test_errors",
    "test_parts_of_a_cache_combine_to_the_whole",
)

globals().update(names_in("test_decode_attention", without=WITHOUT))

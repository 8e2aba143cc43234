"""Names in generated Triton code, which fields of payloads cannot use. Known without importing Triton."""

from __future__ import annotations

_RUNTIME = """
add_at as_bytes ceil floor as_elements as_scalar bfloat16_bits bounded ceil_div choose chunk_count chunk_max chunk_min
chunk_sum chunk_sum_squares chunks clamp compensated compensated_again divide empty expand_runs exponent finish_count
finish_max finish_mean finish_min finish_norm finish_sum finite flag hash_numbers hash_table hashed_list item keep_top
key_words launch length_bytes load_bits load_digits load_finite load_planes narrow narrowed number pack_positions
pack_rest places positions_bytes power read_field read_length read_scalar round_even rounded_bfloat16 rounded_float16
sample_position sample_words scalar_bytes shorten_runs sort_floats spread stacked store_bits store_chosen store_digits
store_hashed store_planes store_tail uniform unpack_positions watch_for_nonfinite
"""
_LOCALS = """
accumulate at b bad bodies block blocks body body_bytes chunk count decode_all decoded first grad i inside is_group j
key_high key_low keys n num_elements num_ranks out plane rank rows scalars scalars_bytes scale sent start
residual_in residual_out static stats tile tl torch total triton v values watch x
"""

RUNTIME = frozenset(_RUNTIME.split())
"""What `gradwire.lang.targets.triton.runtime` exports."""

RESERVED = RUNTIME | frozenset(_LOCALS.split())

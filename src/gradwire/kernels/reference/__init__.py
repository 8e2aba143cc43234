"""The oracle: every kernel in plain NumPy. `cpu` provides the same names, from modules of the same names."""

from gradwire.kernels.reference.bits import pack_bits, unpack_bits
from gradwire.kernels.reference.blocks import (
    block_extremes,
    block_square_sums,
    encode_indices,
    finalize_blocks,
    lookup_indices,
)
from gradwire.kernels.reference.fixed import pack_fixed, packs_shorter_fixed, unpack_fixed
from gradwire.kernels.reference.floats import exponent_counts, pack_floats, packs_shorter, unpack_floats
from gradwire.kernels.reference.hadamard import hadamard
from gradwire.kernels.reference.low_rank import (
    column_products,
    normalize_rows,
    orthonormalize,
    outer_sum,
    row_products,
)
from gradwire.kernels.reference.owners import owned_positions, split_by_owner
from gradwire.kernels.reference.positions import pack_positions, positions_bytes, unpack_positions
from gradwire.kernels.reference.quantize import (
    add_int8,
    dequantize_int8,
    dequantize_int8_sum,
    finalize_int8,
    quantize_int8,
)
from gradwire.kernels.reference.random import philox, random16, random32
from gradwire.kernels.reference.reduce import abs_max, block_abs_max, count_nonfinite
from gradwire.kernels.reference.rounded import margins_of, pack_rounded, round_floats, unpack_rounded
from gradwire.kernels.reference.select import check_indices, scatter, scatter_sum, take, top_k
from gradwire.kernels.reference.sweep import accumulate, advance_velocity, cast, compensate, weighted_sum
from gradwire.kernels.reference.ternary import pack_ternary, unpack_ternary, unpack_ternary_sum
from gradwire.kernels.reference.truncate import truncate_floats, update_limits
from gradwire.kernels.reference.zero_run import zero_run_decode, zero_run_encode

__all__ = [
    "abs_max",
    "accumulate",
    "add_int8",
    "advance_velocity",
    "block_abs_max",
    "block_extremes",
    "block_square_sums",
    "cast",
    "check_indices",
    "column_products",
    "compensate",
    "count_nonfinite",
    "dequantize_int8",
    "dequantize_int8_sum",
    "encode_indices",
    "exponent_counts",
    "finalize_blocks",
    "finalize_int8",
    "hadamard",
    "lookup_indices",
    "margins_of",
    "normalize_rows",
    "orthonormalize",
    "outer_sum",
    "owned_positions",
    "pack_bits",
    "pack_fixed",
    "pack_floats",
    "pack_positions",
    "pack_rounded",
    "pack_ternary",
    "packs_shorter",
    "packs_shorter_fixed",
    "philox",
    "positions_bytes",
    "quantize_int8",
    "random16",
    "random32",
    "round_floats",
    "row_products",
    "scatter",
    "scatter_sum",
    "split_by_owner",
    "take",
    "top_k",
    "truncate_floats",
    "unpack_bits",
    "unpack_fixed",
    "unpack_floats",
    "unpack_positions",
    "unpack_rounded",
    "unpack_ternary",
    "unpack_ternary_sum",
    "update_limits",
    "weighted_sum",
    "zero_run_decode",
    "zero_run_encode",
]

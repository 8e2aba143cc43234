"""Every kernel as a Numba loop over short vectors."""

from gradwire.kernels.cpu.bits import (
    pack_bits,
    unpack_bits,
)
from gradwire.kernels.cpu.blocks import (
    block_extremes,
    block_square_sums,
    encode_indices,
    finalize_blocks,
    lookup_indices,
)
from gradwire.kernels.cpu.floats import exponent_counts, pack_floats, packs_shorter, unpack_floats
from gradwire.kernels.cpu.hadamard import hadamard
from gradwire.kernels.cpu.low_rank import column_products, outer_sum, row_products
from gradwire.kernels.cpu.positions import pack_positions, positions_bytes, unpack_positions
from gradwire.kernels.cpu.quantize import (
    add_int8,
    dequantize_int8,
    dequantize_int8_sum,
    finalize_int8,
    quantize_int8,
)
from gradwire.kernels.cpu.random import philox, random16, random32
from gradwire.kernels.cpu.reduce import (
    abs_max,
    block_abs_max,
    count_nonfinite,
)
from gradwire.kernels.cpu.select import (
    check_indices,
    scatter,
    scatter_sum,
    take,
    top_k,
)
from gradwire.kernels.cpu.sweep import accumulate, cast, compensate
from gradwire.kernels.cpu.ternary import pack_ternary, unpack_ternary, unpack_ternary_sum
from gradwire.kernels.cpu.truncate import truncate_floats, update_limits
from gradwire.kernels.cpu.zero_run import zero_run_decode, zero_run_encode

__all__ = [
    "abs_max",
    "accumulate",
    "add_int8",
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
    "outer_sum",
    "pack_bits",
    "pack_floats",
    "pack_positions",
    "pack_ternary",
    "packs_shorter",
    "philox",
    "positions_bytes",
    "quantize_int8",
    "random16",
    "random32",
    "row_products",
    "scatter",
    "scatter_sum",
    "take",
    "top_k",
    "truncate_floats",
    "unpack_bits",
    "unpack_floats",
    "unpack_positions",
    "unpack_ternary",
    "unpack_ternary_sum",
    "update_limits",
    "zero_run_decode",
    "zero_run_encode",
]

"""Every kernel as a Numba loop that LLVM vectorises."""

"""Kernels compiled for a GPU that need not be present: they compile, and their arithmetic rounds once.

This runs in a separate process, in which Triton does not interpret. Kernels are compiled instead of launched, for the
types with which the host functions would launch them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.lang import algorithms

COMPILER = """
import json, sys
import numpy as np, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gradwire.lang import cache, interpret
from gradwire.lang.targets import triton as target
from gradwire.lang.emit import statics
from gradwire.lang.targets.triton import host
from gradwire.lang.operators.arithmetic import static_values
from tests.lang import algorithms
from tests.lang.targets.test_numba import KEYS, environment, gradient

POINTERS = {torch.float32: "*fp32", torch.float64: "*fp64", torch.float16: "*fp16", torch.int16: "*i16",
            torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8", torch.int8: "*i8"}
size, found, empty = 6000, {}, torch.empty
torch.empty = lambda *args, **kwargs: empty(*args, **kwargs).zero_()  # kernels that fill it are not started

def type_of(value):
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, int):
        return "i32" if abs(value) < 2**31 else "i64"
    return "fp32"

def compile_kernel(kernel, grid, *args):
    constants = {p.name: arg for p, arg in zip(kernel.params, args) if p.is_constexpr or arg is None}
    types = {p.name: "constexpr" if p.name in constants else type_of(arg) for p, arg in zip(kernel.params, args)}
    source = ASTSource(kernel, types, constants)
    options = {"enable_fp_fusion": False}
    assembly = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options).asm["ptx"]
    found[f"{name} {kernel.__name__} {len(found)}"] = assembly

host.launch = compile_kernel
for name in sys.argv[1:]:
    program = algorithms.program(name)
    module = cache.load(f"test_{name}_compiled", target.emit(program))
    module.launch = compile_kernel
    static = static_values(statics(program), size)
    rest = torch.zeros(size)
    for x, residual in ((torch.randn(size), rest), (torch.randn(size).bfloat16(), None)):
        module.encode(x, 1.0, residual, residual, None, KEYS, 0, static)
    body = torch.from_numpy(interpret.encode(program, gradient(size), environment(size))[0])
    module.decode(body, torch.zeros(size), None, None, KEYS, 3, static)
print(json.dumps(found))
"""
INEXACT = ("fma.", ".ftz", "div.full", ".approx")


@pytest.mark.skipif(sys.platform != "linux", reason="there is Triton for Linux only")
def test_kernels_compile_and_every_operation_is_rounded_once() -> None:
    names = ["between", "block_norms", "sampled", "ternary", "exponents", "shared_choice"]
    assert set(names) <= set(algorithms.names())
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILER, *names], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name.split()[0] for name in found} == set(names)
    for name, assembly in found.items():
        wrong = [line.strip() for line in assembly.splitlines() if any(sign in line for sign in INEXACT)]
        assert not wrong, (name, wrong[:3])

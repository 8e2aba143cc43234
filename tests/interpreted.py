"""Imported by the conftest of tests of Triton code, before anything imports Triton: without a GPU, interpret it."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

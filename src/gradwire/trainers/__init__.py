"""gradwire in training frameworks, one module per framework. Each is imported when it is first used.

- `accelerate`: `attach` for Hugging Face Accelerate.
- `huggingface`: `GradwireCallback` for the Trainer of Hugging Face Transformers.
- `lightning`: `GradwireCallback` for PyTorch Lightning.
- `packages`: which versions they need, and the error if one is missing.
- `single_process`: what a job of one process gets, where there is nothing to compress.

All three save the residuals of all ranks in the framework's own checkpoints and resume from them.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["accelerate", "huggingface", "lightning"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"gradwire.trainers.{name}")
    raise AttributeError(f"module 'gradwire.trainers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]

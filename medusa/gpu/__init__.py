"""Kernels of our own on a GPU: passes, moves of keys and values, losses. The modules of this package need Triton."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


@cache
def module(name: str) -> ModuleType | None:
    """A module of this package; None without Triton."""
    return import_module(f"medusa.gpu.{name}") if find_spec("triton") else None

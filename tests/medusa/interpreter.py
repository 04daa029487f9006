"""Makes Triton's interpreter twice as fast: functions do not patch its language again, sums may overflow unseen.

A pytest plugin (``-p tests.medusa.interpreter``) of the processes that test_attention_triton.py starts.
"""

from types import ModuleType
from typing import Any

from triton.runtime import interpreter

_patch, _launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
_patched: set[frozenset[ModuleType]] = set()
"""Modules of the language that a launch has patched already, together."""


def _patch_once(function: Any) -> Any:
    seen = (each for each in function.__globals__.values() if isinstance(each, ModuleType))
    modules = frozenset(each for each in seen if each in (interpreter.tl, interpreter.tl.core))
    if modules in _patched:
        return interpreter._LangPatchScope()  # nothing to restore
    _patched.add(modules)
    return _patch(function)


def _launch_afresh(self: Any, *arguments: Any, **options: Any) -> None:
    _patched.clear()
    _launch(self, *arguments, **options)


interpreter._patch_lang, interpreter.GridExecutor.__call__ = _patch_once, _launch_afresh
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

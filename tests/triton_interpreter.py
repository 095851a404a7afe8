"""Triton's kernels on the CPU: import this before any module that has kernels. Skips the module where they run on a device.

Three things of the interpreter are mended: with numpy from 2.4 on no argument of a kernel can be a loop's bound, a third of
the time goes into patching Triton's functions anew for each call of one of them, and float8_e4m3fn is rounded wrongly.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch

if torch.cuda.is_available():  # there kernels are compiled, and a process cannot have both
    pytest.skip("kernels run on the device here: tests/gpu/test_triton.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="triton is not installed: pip install pagetide[triton]")
# Transformers imported it before, to be compiled.
if not hasattr(sys.modules["triton.language.standard"].sum, "rewrite"):
    stale = re.compile(r"triton(\.(?!_C\b).*)?|pagetide\.engine\.(attention|layers)\.triton_.*")
    for name in [name for name in sys.modules if stale.fullmatch(name)]:
        del sys.modules[name]

from triton.runtime import interpreter

_convert_float = interpreter._convert_float
_patch_tensor = interpreter._patch_lang_tensor
_prepared: set[Any] = set()


def _patch_tensor_too(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # of shape [1], which int() refuses


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What a kernel calls. Patches outlast the call, so one is enough."""
    if function.fn not in _prepared:
        interpreter._patch_lang(function.fn)
        _prepared.add(function.fn)
    return function.rewrite()(*args, **kwargs)


def _convert_float_too(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """float32 to float8_e4m3fn by torch: to nearest, ties to even."""
    if (source.name, target.name) != ("fp32", "fp8e4nv"):
        return _convert_float(data, source, target, rounding_mode)
    return torch.from_numpy(np.array(data, np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


interpreter._convert_float = _convert_float_too
interpreter._patch_lang_tensor = _patch_tensor_too
interpreter.InterpretedFunction.__call__ = _call

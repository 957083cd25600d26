"""Functions that torch.compile calls as they are, without tracing them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

# The same as torch.compiler.disable, which would import the compiler (seconds, also for programs
# that do not compile) and wrap the function, so that each call takes 2 us more.
_frames: Any = torch._C._dynamo.eval_frame
_NEVER = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Let torch.compile leave a function alone, with all that it calls."""
    # Both are needed: compiled code that calls the function, and a frame of it that begins.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    _frames.set_code_exec_strategy(function.__code__, _NEVER)
    return function


class Untraced:
    """Methods that torch.compile leaves alone, with all that they call: those of every subclass."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for method in vars(cls).values():
            if isinstance(method, types.FunctionType):
                untraced(method)

"""What torch.compile calls as it is, and does not look into."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

# As torch.compiler.disable does, which imports the compiler: seconds, for programs without it, too.
# And it wraps the function, so that each call takes 2 us more.
_frames: Any = torch._C._dynamo.eval_frame
_NEVER = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Let torch.compile leave a function alone, with all that it calls."""
    # Where compiled code would call it, and where a frame of it begins.
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

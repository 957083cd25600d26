"""What torch.compile calls as it is, and does not look into."""

from __future__ import annotations

import types
from typing import Any

import torch

# As torch.compiler.disable does, which imports the compiler: seconds, for programs without it, too.
_frames: Any = torch._C._dynamo.eval_frame
_NEVER = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


class Untraced:
    """Methods that torch.compile leaves alone, with all that they call: those of every subclass."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for method in vars(cls).values():
            if isinstance(method, types.FunctionType):
                # Where compiled code would call it, and where a frame of it begins.
                method._torchdynamo_disable = True  # type: ignore[attr-defined]
                _frames.set_code_exec_strategy(method.__code__, _NEVER)

"""PyTorch's modes, left while a step runs that the program asked for earlier.

The next use of a parameter makes a step that is due. That use may be in inference mode, in a
transform of ``torch.func``, or under a tracer; these modes are for the use, not for the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

Modes = tuple[bool, torch.dtype, bool, bool]


def left() -> AbstractContextManager[None]:
    """Return a context outside of the modes of this thread."""
    # One expression, as it is asked for each layer.
    if _traced() or _functions() or _dispatch() or _early() or _func() or _cast() or _inference():
        return _outside()
    return _AS_IT_IS


def noted() -> Modes:
    """Return the current values of the settings that a step depends on."""
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
    )


def as_noted(modes: Modes) -> AbstractContextManager[None]:
    """Return a context of the settings as they were when they were noted."""
    before = noted()
    return _AS_IT_IS if before == modes else _between(before, modes)


_AS_IT_IS: AbstractContextManager[None] = nullcontext()


@contextlib.contextmanager
def _between(before: Modes, modes: Modes) -> Iterator[None]:
    _set(modes)
    try:
        yield
    finally:
        _set(before)


def _set(modes: Modes) -> None:
    grad, dtype, deterministic, warn_only = modes
    torch.set_grad_enabled(grad)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    with ExitStack() as stack:
        for is_on, leave in _LEAVE:
            if is_on():
                stack.enter_context(leave())
        yield


@contextlib.contextmanager
def _without_function_modes() -> Iterator[None]:
    """Leave modes such as ``torch.device``; classes of tensors keep their functions."""
    pop, push = torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack
    kept = [pop() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(kept):
            push(mode)


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Leave ``torch.jit.trace``."""
    jit: Any = torch._C
    state = jit._get_tracing_state()
    jit._set_tracing_state(None)
    try:
        yield
    finally:
        jit._set_tracing_state(state)


# Whether there are modes of a kind, in this thread.
_traced = torch._C._get_tracing_state
_functions = torch._C._len_torch_function_stack
_dispatch = torch._C._len_torch_dispatch_stack
_early = partial(  # of a tracer that runs before PyTorch takes operators apart
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch
)
_func = torch._C._functorch.peek_interpreter_stack
_cast = torch._C._is_any_autocast_enabled
_inference = torch.is_inference_mode_enabled

_LEAVE: tuple[tuple[Callable[[], Any], Callable[[], AbstractContextManager[Any]]], ...] = (
    (_traced, _untraced),
    (_functions, _without_function_modes),
    (_dispatch, _disable_current_modes),
    (_early, _disable_current_modes),
    (_func, temporarily_clear_interpreter_stack),
    (_cast, torch._C._DisableAutocast),
    (_inference, lambda: torch.inference_mode(False)),
)

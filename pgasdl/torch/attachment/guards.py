"""Tensors that a program may hold, but not use yet: their first use makes them ready.

PyTorch asks the class of a tensor before it runs a function on it (``__torch_function__``). While
ranks exchange a gradient, or while a parameter's step is due, the tensor has a class that makes it
ready first. Autograd, which adds to gradients, does not ask.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from pgasdl.torch.untraced import untraced

# Functions that describe a tensor without a look at its elements, or set its gradient.
_ABOUT = {
    getattr(Tensor, name).__get__
    for name in (
        "grad",
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "nbytes",
        "requires_grad",
        "is_leaf",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "is_meta",
        "is_cpu",
        "is_cuda",
        "grad_fn",
        "_version",
    )
} | {
    vars(torch._C.TensorBase)["grad"].__set__,
    vars(torch._C.TensorBase)["grad"].__delete__,
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.size,
    Tensor.stride,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
}
_GRAD = vars(torch._C.TensorBase)["grad"].__get__


class _Guarded:
    """The base of the guarded classes.

    ``_pgasdl_ready`` releases the tensor, or raises. ``_pgasdl_unknown`` : only after that it is
    known whether the tensor has a gradient.
    """

    _base: type[Tensor]
    _pgasdl_ready: Callable[[], None]
    _pgasdl_unknown: bool

    def __deepcopy__(self, memo: Any) -> Any:
        self._pgasdl_ready()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._pgasdl_ready()
        return self.__reduce_ex__(protocol)


def guard(tensor: Tensor, ready: Callable[[], None], *, unknown: bool = False) -> None:
    """Call ``ready``, which has to release the tensor or raise, before the tensor's next use.

    ``unknown`` : only after that it is known whether the tensor has a gradient
    """
    if not isinstance(tensor, _Guarded):
        tensor.__class__ = _class_of(type(tensor))
    guarded = cast(_Guarded, tensor)
    guarded._pgasdl_ready, guarded._pgasdl_unknown = ready, unknown


def tell_gradient(tensor: Tensor) -> None:
    """Note that it is known now whether a guarded tensor has a gradient."""
    if isinstance(tensor, _Guarded):
        tensor._pgasdl_unknown = False


def release(tensors: Iterable[Tensor]) -> None:
    """Give the tensors to the program."""
    for tensor in tensors:
        if isinstance(tensor, _Guarded):
            tensor.__class__ = tensor._base
            del tensor._pgasdl_ready, tensor._pgasdl_unknown


@cache
def _class_of(base: type[Tensor]) -> type[Tensor]:
    members = {"_base": base, "__torch_function__": classmethod(_before)}
    metaclass: Any = type(base)
    return cast(type[Tensor], metaclass(f"Guarded{base.__name__}", (_Guarded, base), members))


@untraced
def _before(
    _: type[Tensor], func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Make the tensors that a function uses ready, then run it."""
    given = kwargs or {}
    if func in _ABOUT and not (func == _GRAD and args[0]._pgasdl_unknown):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **given)
    for tensor in _found((*args, *given.values())):
        tensor._pgasdl_ready()
    return func(*args, **given)


def _found(values: Iterable[Any]) -> Iterator[_Guarded]:
    """Yield the tensors in arguments that are guarded now; one made ready meanwhile is not."""
    for value in values:
        if isinstance(value, _Guarded):
            yield value
        elif isinstance(value, list | tuple):
            yield from _found(value)
        elif isinstance(value, dict):
            yield from _found(value.values())

"""Link pgasdl into PyTorch: gradients of a model, wide layers, and peers' tensors to write to.

:func:`attach` a model, or give DistributedDataParallel a hook. Spread the weights of wide layers by
:class:`DistributedLinear`. Write to peers' tensors through a
:class:`Window`, or by the verbs of torch's symmetric memory, in :mod:`symmetric_memory`.

For ``torch.distributed`` there is a backend: ``init_process_group("pgasdl")``, which works without
importing this module.

Each name is loaded on first use: PyTorch imports this package to register the backend.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgasdl.torch import symmetric_memory as symmetric_memory
    from pgasdl.torch.attachment.attach import attach as attach
    from pgasdl.torch.attachment.attachment import Attachment as Attachment
    from pgasdl.torch.ddp import DDPState as DDPState
    from pgasdl.torch.ddp import ddp_hook as ddp_hook
    from pgasdl.torch.linear import DistributedLinear as DistributedLinear
    from pgasdl.torch.window import Window as Window
    from pgasdl.torch.window import WindowAccessType as WindowAccessType
    from pgasdl.torch.window import WindowAttr as WindowAttr
    from pgasdl.torch.window import Work as Work

_HOME_OF = {
    "Attachment": "attachment.attachment",
    "DDPState": "ddp",
    "DistributedLinear": "linear",
    "Window": "window",
    "WindowAccessType": "window",
    "WindowAttr": "window",
    "Work": "window",
    "attach": "attachment.attach",
    "ddp_hook": "ddp",
}

__all__ = sorted([*_HOME_OF, "symmetric_memory"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name == "symmetric_memory":
        return import_module("pgasdl.torch.symmetric_memory")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pgasdl.torch' has no attribute {name!r}")
    value = getattr(import_module(f"pgasdl.torch.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""Link pgasdl into PyTorch: gradients of a model, and peers' tensors to write to.

:func:`attach` a model, or give DistributedDataParallel a hook. Write to peers' tensors through a
:class:`Window`, or by the verbs of torch's symmetric memory, in :mod:`symmetric_memory`.

For ``torch.distributed`` there is a backend: ``init_process_group("pgasdl")``, which works without
importing this module.
"""

from pgasdl.training.torch import symmetric_memory
from pgasdl.training.torch.attach import attach
from pgasdl.training.torch.attachment import Attachment
from pgasdl.training.torch.ddp import DDPState, ddp_hook
from pgasdl.training.torch.window import Window, WindowAccessType, WindowAttr, Work

__all__ = [
    "Attachment",
    "DDPState",
    "Window",
    "WindowAccessType",
    "WindowAttr",
    "Work",
    "attach",
    "ddp_hook",
    "symmetric_memory",
]

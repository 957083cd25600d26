"""Link pgasdl into PyTorch: :func:`attach` a model, or give DistributedDataParallel a hook."""

from pgasdl.training.torch.attach import Attachment, attach
from pgasdl.training.torch.ddp import DDPState, ddp_hook

__all__ = ["Attachment", "DDPState", "attach", "ddp_hook"]

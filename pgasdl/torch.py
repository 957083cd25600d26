"""Link pgasdl into a PyTorch training loop: :func:`attach` a model and its optimizer."""

from pgasdl.training.torch.attach import Attachment, attach

__all__ = ["Attachment", "attach"]

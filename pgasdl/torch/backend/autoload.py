"""Tells torch.distributed that there is a backend "pgasdl", without importing what makes it."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Register the backend. PyTorch calls this when it is imported (group ``torch.backends``)."""
    from torch import distributed

    if not distributed.is_available() or hasattr(distributed.Backend, "PGASDL"):
        return
    devices = ["cpu", "cuda"]
    distributed.Backend.register_backend("pgasdl", _create, extended_api=True, devices=devices)


def _create(*given: Any) -> Any:
    if getattr(given[0], "enable_reconfigure", False):  # PyTorch 2.14 and newer
        from pgasdl.torch.backend.reconfigure import create
    else:
        from pgasdl.torch.backend.group import create
    return create(*given)

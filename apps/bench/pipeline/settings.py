"""The settings of one run, for all its processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Settings:
    """The settings of one run."""

    network: str  # a row of the table of networks
    batch: int  # images or texts of one rank
    size: int  # pixels of an image's side, or tokens of a text
    compute: str  # "wait" or "real"
    scaling: str  # "weak": one rank alone has this batch; "strong": it has those of all ranks
    seconds: float  # with compute "wait": the length of an iteration's compute
    write: bool  # with compute "wait": the host writes whole gradients
    threads: int  # threads with which PyTorch computes on a rank

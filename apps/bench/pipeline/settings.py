"""The settings of one run, for all its processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Settings:
    """The settings of one run.

    Attributes
    ----------
    network : str
        A row of the table of networks.
    batch : int
        Images or texts of one rank.
    size : int
        Pixels of an image's side, or tokens of a text.
    compute : str
        "wait" or "real".
    scaling : str
        "weak": one rank alone has this batch; "strong": it has those of all ranks.
    seconds : float
        With compute "wait": the length of an iteration's compute.
    write : bool
        With compute "wait": the host writes whole gradients.
    threads : int
        Threads with which PyTorch computes on a rank.
    """

    network: str
    batch: int
    size: int
    compute: str
    scaling: str
    seconds: float
    write: bool
    threads: int

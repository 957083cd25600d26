"""A server that queues, starts and watches jobs of this machine. It never carries a model's data.

``pgasdl serve`` is the server, ``pgasdl job`` its command, :class:`Client` the same from Python::

    client = Client.find()  # the server of this user, on this machine
    job = client.submit(program=["train.py"], ranks=2, folder="/home/me/digits", restarts=3)
    print(client.wait(job["id"])["state"])

A program that trains talks with its users by :func:`connect`, whoever starts it::

    job = pgasdl.jobs.connect(ctx)

    @job.on("learning-rate")  # pgasdl job send ID learning-rate 0.01
    def _(value):
        optimizer.param_groups[0]["lr"] = value

    with pgasdl.torch.attach(model, optimizer, context=ctx, job=job):
        for iteration in job.iterations(0, 10000):
            ...  # forward, backward, optimizer.step(), optimizer.zero_grad()
            job.metrics({"loss": loss.item()})
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgasdl.jobs.client import Client as Client
    from pgasdl.jobs.training import TrainingJob as TrainingJob
    from pgasdl.jobs.training import connect as connect

_HOME_OF = {"Client": "client", "TrainingJob": "training", "connect": "training"}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    # Loaded on demand: the supervisor of each job imports this package, too.
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pgasdl.jobs' has no attribute {name!r}")
    return getattr(import_module(f"pgasdl.jobs.{_HOME_OF[name]}"), name)

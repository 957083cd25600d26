"""A server that queues, starts and watches jobs of this machine. It never carries a model's data.

``pgasdl serve`` is the server, ``pgasdl job`` its command, :class:`Client` the same from Python::

    client = Client.find()  # the server of this user, on this machine
    job = client.submit(program=["train.py"], ranks=2, folder="/home/me/digits", restarts=3)
    print(client.wait(job["id"])["state"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgasdl.jobs.client import Client as Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    # On demand: the supervisor of each job imports this package, too.
    if name != "Client":
        raise AttributeError(f"module 'pgasdl.jobs' has no attribute {name!r}")
    from pgasdl.jobs.client import Client

    return Client

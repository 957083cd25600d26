"""Ranks as Ray's actors: each calls ``pgasdl.init`` with its place, an address and the secret.

    python docker/ray_digits.py 2 --epochs 1       # on a node of a Ray cluster, or alone

Ray places the actors, on different nodes if it can; from then on pgasdl connects them. They train
``apps/train_digits.py``, whose options follow the number of ranks. pgasdl and the checkout lie at
the same paths on all nodes.
"""

from __future__ import annotations

import argparse
import secrets
import socket
import sys
import tempfile
from pathlib import Path

import ray

import pgasdl

APPS = Path(__file__).resolve().parents[1] / "apps"


@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
class Rank:
    """One rank, in a process of its own."""

    def address(self) -> tuple[str, int]:
        """Return a free address of this node, where rank 0 can serve."""
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as free:
            return host, free.getsockname()[1]

    def train(
        self, rank: int, size: int, store: tuple[str, int], secret: bytes, options: list[str]
    ) -> None:
        """Join the job and train."""
        sys.path.insert(0, str(APPS))
        import train_digits

        given = train_digits.options(options)
        train_digits.prepare(given)
        with tempfile.NamedTemporaryFile() as file:  # only this user can read it
            file.write(secret)
            file.flush()
            with pgasdl.init(rank=rank, size=size, store=store, secret_file=file.name) as ctx:
                train_digits.report(ctx, given, train_digits.train(ctx, given))


def main() -> None:
    """Start the actors and wait for all of them."""
    parser = argparse.ArgumentParser(description="Train in Ray's actors.")
    parser.add_argument("ranks", type=int)
    given, options = parser.parse_known_args()
    ray.init()
    actors = [Rank.remote() for _ in range(given.ranks)]
    store = ray.get(actors[0].address.remote())
    secret = secrets.token_bytes(32)
    ray.get(
        [
            actor.train.remote(rank, given.ranks, store, secret, options)
            for rank, actor in enumerate(actors)
        ]
    )


if __name__ == "__main__":
    main()

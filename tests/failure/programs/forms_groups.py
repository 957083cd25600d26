"""All ranks form groups until one is lost; then the first call of survivors() succeeds."""

from __future__ import annotations

import itertools

from rank_tools import report, say

import pgasdl
from pgasdl import PeerLostError


def main() -> None:
    with pgasdl.init() as ctx:
        try:
            for number in itertools.count():
                if number == 3:
                    say("working")
                ctx.group(range(ctx.size)).delete()
        except PeerLostError as error:
            report(ctx, error)
        group = ctx.survivors()
        group.barrier()
        say("recovered", ranks=group.ranks)


if __name__ == "__main__":
    main()

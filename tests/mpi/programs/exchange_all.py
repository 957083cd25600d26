"""All cases of exchange_tools.py with the plans that the command line names."""

from __future__ import annotations

import sys

from exchange_tools import cases, expected, train

import pgasdl


def main() -> None:
    """Arguments: the progress mode, then the plans."""
    with pgasdl.init(progress=sys.argv[1], log="warning", timeout=60) as ctx:
        assert ctx.transport_of((ctx.rank + 1) % ctx.size) == "mpi"
        n_checked = 0
        for plan in sys.argv[2:]:
            for case in cases(plan):
                train(ctx, case, expected(case, ctx.size, 3))
                n_checked += 1
        if ctx.rank == 0:
            print(f"checked {n_checked} cases", flush=True)


if __name__ == "__main__":
    main()

"""Train the app's network in several ways in one job; each rank prints the weights' digests."""

from __future__ import annotations

import contextlib
import io
import json
import sys

import train_digits

import pgasdl


def main() -> None:
    """The command line is a JSON list of command lines."""
    digests = []
    with pgasdl.init(log="warning") as ctx:
        for arguments in json.loads(sys.argv[1]):
            given = train_digits.options(arguments.split())
            train_digits.prepare(given)
            with contextlib.redirect_stdout(io.StringIO()):
                network = train_digits.train(ctx, given).network
            digests.append(train_digits.digest(network))
    sys.stdout.write(json.dumps(digests) + "\n")  # in one piece, as other ranks write too


if __name__ == "__main__":
    main()

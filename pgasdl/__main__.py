"""``python -m pgasdl``: the same as the ``pgasdl`` command."""

import sys

from pgasdl.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())

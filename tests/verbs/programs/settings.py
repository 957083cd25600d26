"""As exact.py, with variables that differ between the ranks.

``settings.py HOSTS NAME=VALUE/VALUE...``: of each variable the value of every rank.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main(hosts: str, *variables: str) -> None:
    for variable in variables:
        name, _, values = variable.partition("=")
        os.environ[name] = values.split("/")[int(os.environ["PGASDL_RANK"])]
    exact = Path(__file__).with_name("exact.py")
    runpy.run_path(str(exact))["main"](hosts)


if __name__ == "__main__":
    main(*sys.argv[1:])

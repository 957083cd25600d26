"""A real Ray of two nodes with one processor each, so that each has one of two actors."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import pytest
from support import digits, two_hosts
from support.places import ROOT
from support.requiring import lacking

pytestmark = pytest.mark.full

START = (
    "ray start --num-cpus=1 --object-store-memory=80000000 --disable-usage-stats "
    "--node-ip-address=198.18.0."
)


def test_actors(tmp_path: Path) -> None:
    two_hosts.require()
    if importlib.util.find_spec("ray") is None:
        lacking("pip install 'pgasdl[launchers]'")
    saved = tmp_path / "weights.npz"
    _, *options = digits.training(saved)
    program = shlex.join(["python3", str(ROOT / "docker/ray_digits.py"), "2", *options])
    script = f"""
        on node1 {START}1 --head --port=6379 --include-dashboard=false --temp-dir=/run/ray
        on node2 {START}2 --address=198.18.0.1:6379
        RAY_ADDRESS=198.18.0.1:6379 {program}
    """
    told = two_hosts.succeeded(tmp_path, script)
    assert "the same bits on 2 ranks" in told
    digits.require_same(2, saved)

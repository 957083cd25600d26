"""Accelerate and Lightning train with the backend "pgasdl" and with attach; in their own lane."""

from __future__ import annotations

from importlib.util import find_spec

import jobs
import pytest
from support.launcher import torchrun
from tiers import full

PROGRAM = str(jobs.PROGRAMS / "frameworks.py")


def run(framework: str, *arguments: str) -> str:
    """Return what two ranks wrote."""
    if find_spec(framework) is None:
        pytest.skip(f"no {framework} here: pip install accelerate lightning")
    done = torchrun("--nproc-per-node=2", PROGRAM, *arguments, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("how", full(["backend", "attach"]))
@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_ranks_train_the_model_of_one_process(framework: str, how: str) -> None:
    """Several batches of a step, and clipped gradients."""
    assert "same" in run(framework, f"{framework}_{how}").splitlines()


@pytest.mark.parametrize("script", full(["test_script", "test_ops", "test_sync"]))
def test_accelerates_own_scripts(script: str) -> None:
    run("accelerate", "accelerate_script", script)

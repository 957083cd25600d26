"""The import paths of programs stay valid, wherever the code behind them lies."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import pgasdl

NAMES = {
    "pgasdl": (
        "AlignmentError Block BootstrapError BufferRefusedError CheckpointError ClosedError Collective "
        "ConfigError Context Counters DataError Footprint GradientExchange Group JobError "
        "LayerTimes LayoutError Limits MismatchError "
        "NotificationError PeerLostError PgasError PlanError PoolFullError QueueError QueueFullError RankError "
        "Segment SegmentError PgasTimeoutError Traffic UnavailableError Waits __version__ init show_versions"
    ),
    "pgasdl.checkpoint": ("FORMATS CheckpointError Checkpoints Shard Sharded load open_sharded"),
    "pgasdl.errors": "ConfigError PeerLostError PgasError PlanError PgasTimeoutError",
    "pgasdl.input": "Batches Iterations Loader Prefetcher Records",
    "pgasdl.jobs": "Client TrainingJob connect",
    "pgasdl.loopback": "run",
    "pgasdl.matrix": (
        "Block DistributedMatrix DistributedVector Explanation Layout LayoutError Movement Reader "
        "array columns cyclic empty explain from_dtensor fromfunction full grid load load_state "
        "random replicated rows save standard_normal to_dtensor zeros"
    ),
    "pgasdl.models": "layers",
    "pgasdl.plans": (
        "EXCHANGES KINDS PLANS Call Copy Flush Plan PlanError PlanSpec Put Reduce Span Step Wait "
        "blocks build build_all build_phases describe register validate_all validate_phases"
    ),
    "pgasdl.plans.check": "Finding assert_ok check",
    "pgasdl.plans.cost": "Model predict",
    "pgasdl.plans.plan": "Plan PlanSpec Put Reduce Span Step Wait",
    "pgasdl.simulate": (
        "MACHINES Compute Exchange Join Level Machine Outcome Start fat_tree flat numa_nodes "
        "simulate supernodes"
    ),
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names(module: str) -> None:
    there = import_module(module)
    for name in NAMES[module].split():
        assert getattr(there, name) is not None, f"{module}.{name}"


def test_the_package_lists_what_it_has() -> None:
    assert set(pgasdl.__all__) == set(NAMES["pgasdl"].split()) - {"__version__"}
    assert set(pgasdl.__all__) <= set(dir(pgasdl))


def test_importing_the_package_loads_nothing_else() -> None:
    code = (
        "import sys, pgasdl; loaded = sorted(n for n in sys.modules if n.startswith('pgasdl.')); "
        "assert not loaded and 'numpy' not in sys.modules, loaded"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_importing_the_pytorch_package_loads_no_pytorch() -> None:
    code = (
        "import sys, pgasdl.torch.backend.autoload; loaded = sorted(n for n in sys.modules "
        "if n.startswith(('torch', 'numpy', 'pgasdl.')) and n.count('.') < 2); "
        "assert loaded == ['pgasdl.torch'], loaded"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_the_command_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pgasdl", "version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == pgasdl.__version__

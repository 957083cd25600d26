"""The import paths of programs stay valid, wherever the code behind them lies."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from support.places import ROOT

import pgasdl
import pgasdl.errors
from pgasdl import loopback
from pgasdl.errors import RENAMED

# Programs write these names: a change of the table is a change of the interface, and goes into the
# changelog and into .github/docs/names.rst.
NAMES = {
    "pgasdl": (
        "AlignmentError Block BootstrapError BufferRefusedError CheckpointError ClosedError "
        "Collective ConfigError Context Counters DataError Footprint GradientExchange Group "
        "JobError LayerTimes LayoutError Limits MismatchError NotificationError PeerLostError "
        "PgasError PgasTimeoutError PlanError PoolFullError QueueError QueueFullError RankError "
        "Segment SegmentError Traffic UnavailableError Waits init join show_versions"
    ),
    "pgasdl.checkpoint": "CheckpointError Checkpoints FORMATS Shard Sharded load open_sharded",
    "pgasdl.input": "Batches Iterations Loader Prefetcher Records",
    "pgasdl.jobs": "Client TrainingJob connect",
    "pgasdl.loopback": "run",
    "pgasdl.matrix": (
        "Block DistributedMatrix DistributedVector Explanation Layout LayoutError Movement Reader "
        "RemapHandle Span array columns cyclic empty explain eye from_dtensor fromfunction full "
        "grid keep load load_state matmul random replicated rows save serve standard_normal "
        "to_dtensor trace zeros"
    ),
    "pgasdl.plans": (
        "Call Case Copy EXCHANGES Flush KINDS Members PLANS Plan PlanError PlanSpec Put Reduce "
        "Span Step Wait always blocks build build_all build_phases describe register spec_of "
        "validate validate_all validate_phases"
    ),
    "pgasdl.plans.check": "Finding assert_ok check",
    "pgasdl.simulate": (
        "Compute Exchange Join Level MACHINES Machine Outcome Start fat_tree flat numa_nodes "
        "simulate supernodes"
    ),
    "pgasdl.torch": (
        "Attachment DDPState DistributedLinear Window WindowAccessType WindowAttr Work attach "
        "ddp_hook symmetric_memory"
    ),
    "pgasdl.torch.symmetric_memory": (
        "SymmetricMemory empty get_backend get_signal_pad_size is_symm_mem_tensor put_signal "
        "rendezvous set_signal_pad_size wait_signal"
    ),
}
# Modules without a list of names, and what programs may take from them.
ALSO = {
    "pgasdl": "__version__",
    "pgasdl.errors": "ConfigError PeerLostError PgasError PgasTimeoutError PlanError",
    "pgasdl.models": "layers",
    "pgasdl.plans.cost": "Model predict",
    "pgasdl.plans.plan": "Plan PlanSpec Put Reduce Span Step Wait",
}
METHODS = {
    "Context": (
        "all_gather allreduce allreduce_handle atomic_compare_swap atomic_fetch_add barrier bind "
        "broadcast close closed collective_handle counters describe dump_flight_record empty "
        "empty_like flight_record footprint group health kill limits mapped notify notify_add "
        "notify_on notify_reset notify_reset_on notify_wait_count notify_wait_on notify_waitsome "
        "openmetrics passive_receive passive_send ping pool queue_create queue_delete queue_size "
        "rank read read_list read_list_notify read_notify reconnect reduce_scatter segment size "
        "survivors takes_devices timeout transport_of wait write write_list write_list_notify "
        "write_list_notify_add write_list_notify_on write_notify write_notify_add write_notify_on "
        "zeros"
    ),
    "GradientExchange": (
        "answer blocks close describe finish gradient plan ready serve times timing timings turn "
        "wait weight"
    ),
}
DOCS = ROOT / ".github/docs"


@pytest.mark.parametrize("module", NAMES)
def test_each_module_has_these_names_and_no_more(module: str) -> None:
    there = import_module(module)
    assert sorted(there.__all__) == sorted(NAMES[module].split())
    for name in NAMES[module].split():
        assert getattr(there, name) is not None, f"{module}.{name}"


@pytest.mark.parametrize("module", ALSO)
def test_names_of_modules_without_a_list(module: str) -> None:
    for name in ALSO[module].split():
        assert getattr(import_module(module), name) is not None, f"{module}.{name}"


@pytest.mark.parametrize("name", METHODS)
def test_methods(name: str) -> None:
    its = {each for each in dir(getattr(pgasdl, name)) if not each.startswith("_")}
    annotated = {"config", "policy", "segments", "state", "topology", "launch", "world"}
    assert sorted(its - annotated) == METHODS[name].split()


@pytest.mark.parametrize("module", NAMES)
def test_the_documentation_lists_every_name(module: str) -> None:
    text = "\n".join(path.read_text() for path in DOCS.rglob("*.rst"))
    whole = re.search(rf"automodule:: {re.escape(module)}\n   :members:( run)?\n", text)
    for name in NAMES[module].split():
        listed = re.search(rf"auto\w+:: ([\w.]+\.)?{name}\b|``([\w.]+\.)?{name}``", text)
        assert whole or listed, f"{module}.{name} is in no page of .github/docs"


def _is_exception(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, BaseException)


def public_callables() -> Iterator[tuple[str, Any]]:
    """Yield everything that programs call: functions, classes, and methods of these."""
    for module, names in NAMES.items():
        for name in names.split():
            found = getattr(import_module(module), name)
            if not callable(found) or _is_exception(found):
                continue
            yield f"{module}.{name}", found
            if isinstance(found, type):
                for each in dir(found):
                    if not each.startswith("_") and callable(getattr(found, each)):
                        yield f"{module}.{name}.{each}", getattr(found, each)


def test_every_call_has_a_signature_and_help() -> None:
    for name, call in public_callables():
        inspect.signature(call)
        assert inspect.getdoc(call), name


def test_signatures_of_the_core() -> None:
    signature = inspect.signature(pgasdl.Context.write_notify)
    assert str(signature) == (
        "(self, source: 'Slice', peer: 'int', target: 'Slice', notification: 'int', "
        "value: 'int' = 1, *, queue: 'int' = 0, timeout: 'float | None' = None) -> 'None'"
    )
    bound = inspect.signature(loopback.run(1, lambda ctx: ctx.wait)[0])
    assert str(bound) == "(queue: 'int' = 0, *, timeout: 'float | None' = None) -> 'None'"


@pytest.mark.parametrize("old", RENAMED)
def test_old_names_of_errors_warn_and_catch(old: str) -> None:
    for module in (pgasdl, pgasdl.errors):
        with pytest.warns(DeprecationWarning, match=f"{old} is .*{RENAMED[old]} now") as caught:
            assert getattr(module, old) is getattr(module, RENAMED[old])
        assert caught[0].filename == __file__
    assert old not in dir(pgasdl)
    assert RENAMED[old] in (DOCS / "names.rst").read_text()


def test_every_error_ends_in_error() -> None:
    errors = [each for each in vars(pgasdl.errors).values() if isinstance(each, type)]
    assert len(errors) > 15
    for each in errors:
        assert each.__name__.endswith("Error") and issubclass(each, pgasdl.PgasError)


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

"""Checkpoints of NumPy arrays, alone and beside tensors; and what they need to be installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.environment import environment

pytest.importorskip("safetensors")

from pgasdl.checkpoint import FORMATS, Checkpoints, Shard, load, open_sharded
from pgasdl.checkpoint.state import DTYPES
from pgasdl.errors import CheckpointError, UnavailableError

every_format = pytest.mark.parametrize("format", FORMATS)


def array_of(dtype: np.dtype[Any], shape: tuple[int, ...] = (3, 5)) -> Any:
    """Any bits that are a value of the dtype."""
    bits = np.random.default_rng(4).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return (bits % 2 if dtype.kind == "b" else bits).view(dtype).reshape(shape)


def same(found: Any, expected: Any) -> None:
    """An array with the same bits."""
    assert type(found) is np.ndarray and found.dtype == expected.dtype
    assert found.shape == expected.shape and found.tobytes() == expected.tobytes()


def saved(folder: Path, state: dict[str, Any], format: str = "safetensors") -> dict[str, Any]:
    """The state as it comes back."""
    if format == "dcp":
        pytest.importorskip("torch")
    Checkpoints(folder, format).save(1, state)
    found = Checkpoints(folder, format).load_last()
    assert found is not None
    return found


@every_format
def test_arrays_of_all_dtypes_come_back(format: str, tmp_path: Path) -> None:
    state = {name: array_of(dtype) for name, dtype in DTYPES.items()}
    found = saved(tmp_path, state, format)
    assert found.keys() == state.keys()
    for name, array in state.items():
        same(found[name], array)


@every_format
def test_arrays_of_all_layouts_come_back(format: str, tmp_path: Path) -> None:
    plain = np.arange(24.0).reshape(2, 3, 4)
    fixed = plain.copy()
    fixed.flags.writeable = False
    arrays = [
        *(plain, plain, plain.T, plain[:, ::2], plain[::-1], fixed, np.asfortranarray(plain)),
        *(np.array(3.0), np.empty((0, 2)), np.empty((2, 0), np.int8)),
    ]
    found = saved(tmp_path, {"list": arrays, "big": plain.astype(">f8")}, format)
    for there, expected in zip(found["list"], arrays, strict=True):
        same(there, expected)
        assert there.flags.writeable
    same(found["big"], plain)


@every_format
def test_arrays_beside_tensors_come_back_as_what_they_were(format: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    arrays = {name: array_of(dtype) for name, dtype in DTYPES.items()}
    tensor = torch.arange(6.0).view(2, 3).to(torch.float8_e5m2)
    state = {"arrays": arrays, "shared": arrays, "tensor": tensor, "rest": torch.ones(2)}
    found = saved(tmp_path, state, format)
    for name, array in arrays.items():
        same(found["arrays"][name], array)
        same(found["shared"][name], array)
    assert found["tensor"].dtype == tensor.dtype
    assert torch.equal(found["tensor"].view(torch.uint8), tensor.view(torch.uint8))
    assert torch.equal(found["rest"], torch.ones(2))


def test_other_programs_read_the_arrays(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    weights = np.arange(6.0).reshape(2, 3)
    saved(tmp_path, {"layers": [{"weights": weights}]})
    found = load_file(tmp_path / "00000001.safetensors")
    assert list(found) == ["layers.0.weights"]
    same(found["layers.0.weights"], weights)


@pytest.mark.parametrize("dtype", ["O", "S3", "M8[s]", "complex128", "f4,i4"])
def test_other_dtypes_are_refused(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"a\.b: an array of dtype"):
        Checkpoints(tmp_path).save(1, {"a": {"b": np.zeros(2, dtype)}})
    assert Checkpoints(tmp_path).load_last() is None


def test_masked_arrays_are_refused(tmp_path: Path) -> None:
    masked = np.ma.masked_equal(np.eye(2), 1)
    with pytest.raises(TypeError, match=r"a\.0: a masked array"):
        Checkpoints(tmp_path).save(1, {"a": [masked]})
    with pytest.raises(CheckpointError, match="w: a masked array"):
        shards = [Shard("w", (2, 2), 0, 0, masked)]
        Checkpoints(tmp_path).save_sharded(1, {}, shards, lambda blob: [blob])


def test_texts_that_safetensors_cannot_hold_belong_into_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    def too_large(*_: object) -> None:
        raise SafetensorError("Error while serializing: header too large")

    monkeypatch.setattr("safetensors.numpy.save_file", too_large)  # above 100 MB
    with pytest.raises(ValueError, match="keep them in arrays"):
        Checkpoints(tmp_path).save(1, {"a": "long"})


def test_files_of_other_programs_are_told(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a": np.ones(3)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="save did not write it"):
        load(tmp_path / "other.safetensors")


def test_two_values_of_one_place_are_refused(tmp_path: Path) -> None:
    one = np.ones(1)
    with pytest.raises(ValueError, match=r"have the place 'a\.b'"):
        Checkpoints(tmp_path).save(1, {"a.b": one, "a": {"b": one}})
    with pytest.raises(ValueError, match="of a format, have the place '__metadata__'"):
        Checkpoints(tmp_path).save(1, {"__metadata__": one})
    with pytest.raises(ValueError, match=r"of a format, have the place 'pgasdl\.rest'"):
        Checkpoints(tmp_path).save(1, {"pgasdl": {"rest": one}})


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format 'pickle': there are safetensors, dcp"):
        Checkpoints(tmp_path, "pickle")


# --- what is not installed


def test_without_safetensors_it_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UnavailableError, match="pip install safetensors"):
        Checkpoints(tmp_path)
    for read in (load, open_sharded):
        with pytest.raises(UnavailableError, match="pip install safetensors"):
            read(tmp_path / "x")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnavailableError, match="pip install torch"):
        Checkpoints(tmp_path, "dcp")


def test_a_sharded_checkpoint_needs_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UnavailableError, match="pip install safetensors"):
        checkpoints.save_sharded(1, {}, [], lambda blob: [blob])


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pathlib import Path
import numpy as np
from pgasdl.checkpoint import Checkpoints, Shard
from pgasdl.errors import UnavailableError
folder = Path(sys.argv[1])
try:
    Checkpoints(folder).load_last()
except UnavailableError as error:
    print(error)
checkpoints = Checkpoints(folder / "other")
checkpoints.save(1, {"a": np.ones(3)})
print(checkpoints.load_last())
shards = [Shard("w", (2, 2), 0, 0, np.eye(2))]
checkpoints.save_sharded(2, {"a": np.zeros(1)}, shards, gather=lambda blob: [blob])
found = checkpoints.open_last()
print(found.state(), found.read("w", rows=slice(1)))
"""


def test_arrays_need_no_pytorch_and_tensors_are_told_to(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    saved(tmp_path, {"a": np.ones(3), "t": torch.ones(3)})
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_TORCH, str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{tmp_path}/00000001.safetensors, which holds tensors, needs torch: pip install torch",
        "{'a': array([1., 1., 1.])}",
        "{'a': array([0.])} [[1. 0.]]",
    ]


def test_a_sharded_checkpoint_is_told_from_one_of_format_dcp(tmp_path: Path) -> None:
    shards = [Shard("w", (2, 2), 0, 0, np.eye(2))]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_sharded(1, {}, shards, lambda blob: [blob])
    with pytest.raises(ValueError, match="written by several ranks: open_sharded reads it"):
        load(checkpoints.sharded_path(1))


def test_importing_loads_neither_pytorch_nor_safetensors() -> None:
    code = (
        "import sys, pgasdl.checkpoint; loaded = sorted(n for n in sys.modules "
        "if n.startswith(('torch', 'safetensors'))); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)

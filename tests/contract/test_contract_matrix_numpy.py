"""What users of NumPy write: it works as there, or it is refused by an error that says why."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from contract_harness import contract

import pgasdl.matrix as pm
from pgasdl import loopback
from pgasdl.buffers import DTYPES
from pgasdl.errors import BufferRefusedError, LayoutError, PlanError

LAYOUTS = ("rows", "columns", "grid", "cyclic", "replicated")
# The same text for matrices as for NumPy's arrays: a of 5 x 4, b like it, v of 4 and u of 5.
EXPRESSIONS: tuple[Any, ...] = (
    lambda a, b, v, u: a * [[1.0], [2.0], [3.0], [4.0], [5.0]],
    lambda a, b, v, u: [1.0, 2.0, 3.0, 4.0] * a,
    lambda a, b, v, u: v - [1.0, 2.0, 3.0, 4.0],
    lambda a, b, v, u: a - a.max(1, keepdims=True),
    lambda a, b, v, u: a.min(0, keepdims=True) + b,
    lambda a, b, v, u: np.sum(a, axis=1, keepdims=True) * b,
    lambda a, b, v, u: np.sum(a, axis=(0, 1)),
    lambda a, b, v, u: np.max(a, axis=(1,)),
    lambda a, b, v, u: a.sum(axis=-1),
    lambda a, b, v, u: a.mean(axis=(0, 1), keepdims=True),
    lambda a, b, v, u: np.min(v, keepdims=True),
    lambda a, b, v, u: np.mean(a, 0),
    lambda a, b, v, u: np.linalg.norm(a, axis=1),
    lambda a, b, v, u: np.linalg.norm(a, axis=0),
    lambda a, b, v, u: np.linalg.norm(v, axis=0),
    lambda a, b, v, u: np.linalg.norm(a, 1),
    lambda a, b, v, u: np.linalg.norm(a, axis=1, keepdims=True),
    lambda a, b, v, u: np.sum(a, 0, dtype=np.float64),
    lambda a, b, v, u: np.sum(a, 0, initial=3),
    lambda a, b, v, u: np.clip(a, min=0),
    lambda a, b, v, u: np.clip(a, max=v, min=-1),
    lambda a, b, v, u: np.clip(a, None, 0.5),
    lambda a, b, v, u: a @ [1.0, 2.0, 3.0, 4.0],
    lambda a, b, v, u: [1.0, 2.0, 3.0, 4.0, 5.0] @ a,
    lambda a, b, v, u: a @ [[1.0], [2.0], [3.0], [4.0]],
    lambda a, b, v, u: np.dot(u, b),
    lambda a, b, v, u: v.T + np.transpose(v),
    lambda a, b, v, u: np.transpose(a, (1, 0)),
    lambda a, b, v, u: np.full_like(a, v),
    lambda a, b, v, u: np.full_like(v, 2),
    lambda a, b, v, u: np.where([True, False, True, False], a, b),
    lambda a, b, v, u: np.argmax(a, 1),
)


def set_elements(a: Any, v: Any) -> None:
    a[0, 1] = 5
    a[-1] = np.array([[1, 2, 3, 4]])
    a[1:3] = [9, 8, 7, 6]
    a[1:, 2] = [6, 5, 4, 3]
    a[3, 1:1] = 4
    a[2:4, :2] = [[1], [2]]
    v[-1] = 7
    v[:2] = [3]


@contract(ranks=(1, 2, 3))
def test_what_works_as_in_numpy(ctx: Any) -> None:
    for layout in LAYOUTS:
        values = np.random.default_rng(1)
        due = [values.standard_normal(s).astype(np.float32) for s in ((5, 4), (5, 4), 4, 5)]
        here = [pm.array(ctx, each, layout) for each in due]
        for number, each in enumerate(EXPRESSIONS):
            found, wanted = np.asarray(each(*here)), np.asarray(each(*due))
            assert (number, found.shape, found.dtype) == (number, wanted.shape, wanted.dtype)
            assert np.allclose(found, wanted, rtol=1e-5, atol=1e-5), number
        set_elements(here[0], here[2])
        set_elements(due[0], due[2])
        for one, other in zip(here, due, strict=True):
            assert np.array_equal(np.asarray(one), other)
        assert here[0][0, 1] == 5 and here[2].T is here[2]
        for value in ([1, 2, 3, 4], [[7]], 3):
            found = np.asarray(pm.full(ctx, (5, 4), value, layout))
            assert np.array_equal(found, np.full((5, 4), value))
        assert isinstance(here[0].sum(1, keepdims=True), pm.DistributedMatrix)
        assert np.clip(here[0], min=0, out=here[1]) is here[1]
        assert np.array_equal(np.asarray(here[1]), np.clip(due[0], min=0))


@contract(ranks=(2, 3))
def test_steps_set_what_they_set_in_numpy(ctx: Any) -> None:
    dice = np.random.default_rng(3)
    for number in range(200):
        shape = ((7, 9), (13, 4), (11,), (1, 5))[number % 4]
        due = dice.standard_normal(shape).astype(np.float32)
        a = pm.array(ctx, due, LAYOUTS[number % 5])
        ends = dice.integers(-15, 15, (2, 2)).tolist()
        key = tuple(
            [slice(*end, step), slice(None, None, step), n // 2][dice.integers(0, 3)]
            for n, end, step in zip(
                shape, ends, dice.choice([-3, -2, -1, 1, 2, 5], 2), strict=False
            )
        )
        value = dice.standard_normal(due[key].shape).astype(np.float32)
        a[key] = due[key] = value
        assert np.array_equal(a, due), (key, shape)


def test_setting_takes_memory_for_what_is_set() -> None:
    """Much less than a place of 8 bytes for each element of the matrix."""
    mask = np.random.default_rng(1).random((512, 1024)) < 0.5

    def program(ctx: Any) -> None:
        a = pm.zeros(ctx, mask.shape)
        keys: tuple[tuple[Any, float], ...] = (
            *((np.s_[::2], 0.1), (np.s_[::-3, 1::2], 0.1), (mask, 0.1), ([1, 5], 0.5)),
            *((mask[:, 0], 12), (np.s_[:, mask[0]], 12)),
        )
        for key, due in keys:
            tracemalloc.start()
            a[key] = 3
            taken = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert taken < due * a.size, key
            assert (np.asarray(a)[key] == 3).all()

    loopback.run(1, program)


@contract(ranks=2)
def test_norms_of_what_squares_have_no_room_for(ctx: Any) -> None:
    for dtype, value in ((np.float16, 6e4), (np.float32, 1e30), (np.float32, 1e-30), (np.int32, 9)):
        a = pm.full(ctx, (300, 100), value, dtype=dtype)
        due = float(np.asarray(a)[0, 0]) * 30000**0.5
        assert np.isclose(a.norm(), due, rtol=1e-6, atol=0)
        assert np.allclose(np.asarray(a.norm(1), np.float64), due / 300**0.5, rtol=1e-3, atol=0)
    assert pm.zeros(ctx, (5, 5)).norm() == 0
    assert np.isnan(pm.full(ctx, (5, 5), np.nan).norm())


@contract(ranks=2)
def test_means_do_not_overflow(ctx: Any) -> None:
    for dtype in (np.float16, DTYPES["bfloat16"], np.float32, np.int32, np.bool_):
        for layout in ("rows", "columns"):
            a = pm.full(ctx, (2, 70000), 1, layout, dtype=dtype)
            due = np.float64 if np.dtype(dtype).kind in "ib" else dtype
            for axis in (None, 0, 1):
                found = np.asarray(a.mean(axis))
                assert found.dtype == due and (found == 1).all()


@contract(ranks=2)
def test_random_numbers_are_below_1(ctx: Any) -> None:
    """float64, rounded to a narrower dtype, would be 1 now and then."""
    for dtype, step in (("float16", 2.0**-11), ("bfloat16", 2.0**-8), ("float32", 2.0**-24)):
        a = np.asarray(pm.random(ctx, (400, 400), 1, dtype=DTYPES[dtype])).astype(np.float64)
        assert a.min() >= 0 and a.max() < 1
        assert (a % step == 0).all() and abs(a.mean() - 0.5) < 0.01


def test_a_vector_draws_about_as_many_numbers_as_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    philox = np.random.Philox
    monkeypatch.setattr(np.random, "Philox", lambda **given: made.append(given) or philox(**given))

    def drawn(n: int, ranks: int, layout: str = "rows") -> list[Any]:
        return loopback.run(ranks, lambda ctx: whole(pm.standard_normal(ctx, n, 1, layout)))

    def whole(array: Any) -> list[Any]:
        found: list[Any] = np.asarray(array).tolist()
        return found

    (vector,) = drawn(10_000, 1)
    assert len(made) == 3
    for layout in ("rows", "columns", "cyclic", "replicated"):
        assert drawn(10_000, 3, layout) == [vector] * 3
    assert drawn(5000, 2) == [vector[:5000]] * 2


@contract(ranks=2)
def test_what_is_refused_says_why(ctx: Any) -> None:
    a, v, n = pm.zeros(ctx, (4, 4)), pm.zeros(ctx, 4), pm.zeros(ctx, 4, dtype=np.int32)
    three = np.ones((2, 4, 4), np.float32)
    for wrong in (
        lambda: pm.zeros(ctx, (2, 3, 4)),
        lambda: pm.zeros(ctx, 2.5),  # type: ignore[arg-type]
        lambda: pm.zeros(ctx, (2, -1)),
        lambda: pm.array(ctx, three),
        lambda: pm.full(ctx, (2, 2), [1, 2, 3]),
        lambda: a + three,
        lambda: a @ three,
        lambda: a @ 3,
        lambda: np.dot(v, 3),
        lambda: a.sum(2),
        lambda: a.sum((0, 0)),
        lambda: a.__setitem__(0, [1, 2, 3]),
        lambda: a + pm.zeros(ctx, 3),
        lambda: pm.rows((4, 4), []),
        lambda: pm.columns((4, 4), []),
        lambda: pm.grid((4, 4), []),
        lambda: pm.cyclic((4, 4), []),
        lambda: pm.replicated((4, 4), []),
    ):
        with pytest.raises(LayoutError):
            wrong()
    for index in ([0, 4], a, (0, 0, 0), 1.0, "x", (..., ...), np.ones(3, bool)):
        with pytest.raises(IndexError):
            a[index]
    for odd in (lambda: n + 2**40, lambda: n.__setitem__(0, 2**40)):
        with pytest.raises(OverflowError):
            odd()
    for of_others in (lambda: a + [object()] * 4, lambda: a @ np.ones(4, complex)):
        with pytest.raises((BufferRefusedError, TypeError)):
            of_others()
    for given in ([[1, 2], [3]], np.arange(4, dtype=">f4"), np.ones((2, 2, 2)), [2**70]):
        with pytest.raises(BufferRefusedError, match="rank 1 has no array"):
            pm.array(ctx, given if ctx.rank else None, root=1)
    assert (np.asarray(a) == 0).all()  # nothing was lost


@contract(ranks=2)
def test_numbers_beside_short_floats_are_not_rounded(ctx: Any) -> None:
    """NumPy makes float64 of bfloat16 and a number of Python."""
    due = np.ones(3, DTYPES["bfloat16"])
    found = np.where([True, False, True], pm.array(ctx, due), 1e30)
    assert (due.reshape(1, 3) @ pm.array(ctx, due)).dtype == due.dtype
    assert found.dtype == np.float64 and np.asarray(found).tolist() == [1.0, 1e30, 1.0]


@contract(ranks=2)
def test_short_floats_meet_numbers_as_in_numpy(ctx: Any) -> None:
    """A number of Python takes the dtype of the array before it is used."""
    functions: tuple[Any, ...] = (
        *(np.add, np.multiply, np.divide, np.power, np.remainder, np.equal, np.less, np.nextafter),
        *(np.logical_and, np.float_power, lambda a, b: np.where([True, False, True, False], a, b)),
        *(lambda a, b: np.clip(a, b, None), lambda a, b: np.ldexp(a, 3) - b),
    )
    with np.errstate(all="ignore"):
        for dtype in (np.float16, DTYPES["bfloat16"]):
            due = np.array([0.1, 1000, 60000, -1 / 3]).astype(dtype)
            a = pm.array(ctx, due)
            for value in (0.1, 1e5, 1e-9, 2049, 65520, 3, True, np.float32(0.1), np.float64(1e5)):
                for function in functions:
                    for turned in (False, True):
                        found, wanted = (
                            function(value, x) if turned else function(x, value) for x in (a, due)
                        )
                        case = function, value, turned
                        assert (case, found.dtype) == (case, wanted.dtype)
                        assert np.array_equal(found, wanted, equal_nan=True), case
            a += 0.1
            due += due.dtype.type(0.1)
            assert np.array_equal(a, due) and np.array_equal(np.spacing(a), np.spacing(due))


@contract(ranks=(2, 3))
def test_what_one_rank_would_refuse_alone_all_refuse(ctx: Any) -> None:
    n = pm.array(ctx, np.arange(4))
    for exponents in (pm.array(ctx, np.array([1, 1, 1, -1])), [1, 1, 1, -1], -1):
        with pytest.raises(ValueError, match="negative integer powers"):
            n **= exponents
    one = pm.array(ctx, np.ones((1, 1), np.int32), "rows")
    with pytest.raises(TypeError, match="NoneType"):
        one < None  # noqa: B015
    for dtype in (np.float32, np.int64, bool):
        with pytest.raises(PlanError, match="astype"):
            one.remap("replicated", dtype)
    assert np.asarray(n).tolist() == [0, 1, 2, 3] and one.sum() == 1

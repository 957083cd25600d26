"""Programs as users of NumPy write them, with care and without: the same text for both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from contract_harness import contract

import pgasdl.matrix as pm

X = np.random.default_rng(0).standard_normal((6, 4))
LABELS = np.array([0, 3, 1, 1, 2, 0])
Made = Callable[[Any], Any]


def loss_of_softmax(x: Any, made: Made) -> Any:
    e = np.exp(x - x.max(axis=1, keepdims=True))
    p = e / e.sum(axis=1, keepdims=True)
    return -(made(np.eye(4)[LABELS]) * np.log(p)).sum() / len(x)


def nearest_centres(x: Any, made: Made) -> Any:
    c = made(X[:3] + 0.1)
    squares = np.expand_dims(np.sum(x * x, axis=1), 1) - 2 * (x @ c.T) + np.sum(c * c, axis=1)
    return np.argmin(squares, axis=1)


def descent(x: Any, made: Made) -> Any:
    w, t = made(np.zeros(4)), made(np.arange(6.0))
    for _ in range(5):
        w -= 0.01 * (x.T @ (x @ w - t))
    return w


def largest_eigenvalue(x: Any, made: Made) -> Any:
    g, v = x.T @ x, made(np.ones(4))
    for _ in range(10):
        v = g @ v
        v = v / np.linalg.norm(v)
    return v @ (g @ v)


def centred_kernel(x: Any, made: Made) -> Any:
    k = x @ x.T
    return k - k.mean(axis=0) - k.mean(axis=1, keepdims=True) + k.mean()


def without_negatives(x: Any, made: Made) -> Any:
    x[x < 0] = 0
    x[::2, -1] = made(np.arange(3.0))
    return x


def whole(x: Any, made: Made) -> Any:
    return np.sort(x, axis=0)[:, None, 0], np.linalg.svd(x)[1], np.einsum("ij,ij->i", x, x)


SKILLED: tuple[Any, ...] = (
    lambda x, made: (x - x.mean(axis=0)) / x.std(axis=0),
    lambda x, made: (x - x.mean(0)).T @ (x - x.mean(0)) / (x.shape[0] - 1),
    lambda x, made: [x[i : i + 2].sum() for i in range(0, len(x), 2)],
    lambda x, made: (np.argmax(x, axis=1) == made(LABELS)).mean(),
    loss_of_softmax,
    nearest_centres,
    descent,
    largest_eigenvalue,
    centred_kernel,
    without_negatives,
)
CARELESS: tuple[Any, ...] = (
    lambda x, made: (x > 0) & (x < 1) | (x == None),  # noqa: E711
    lambda x, made: (min(x[:, 0]), max(x[:, 0]), sum(x)),
    lambda x, made: np.append(x, x),
    lambda x, made: np.column_stack([x, np.ones(6)]),
    lambda x, made: np.array([x, x]),
    lambda x, made: x[:, 0][:, None] * x[0],
    lambda x, made: f"{x.sum():.3f} {float(x[0, 0])} {x.sum().item():.3f} {X[0, 0] in x}",
    lambda x, made: (np.where(x > 0), np.isclose(x, x).all(), np.array_equal(x, x)),
    lambda x, made: (x.clip(0, 1), x.dot(x.T), x.transpose(), x.take([1, 0], 1), x**2, 2**x),
    whole,
)


def at_place(x: Any, made: Made) -> None:
    np.add.at(x, 0, 1)


def local(x: Any, made: Made) -> None:
    here = np.ones((6, 4))
    here += x


# What NumPy refuses, too; then what it does, and how it is refused.
REFUSED: tuple[Any, ...] = (
    (lambda x, made: x + np.ones(6), ValueError, "does not fit"),
    (lambda x, made: x @ x, ValueError, "product of shapes"),
    (lambda x, made: 1 if x > 0 else 2, ValueError, "no truth"),
    (lambda x, made: x > 0 and x < 1, ValueError, "no truth"),
    (lambda x, made: x[6], IndexError, "6"),
    (lambda x, made: x.sum(axis=2), ValueError, "axis 2"),
    (lambda x, made: made(np.arange(4)).__itruediv__(2), ValueError, "another kind"),
    (lambda x, made: made(np.arange(4)).__setitem__(0, np.nan), ValueError, "NaN to integer"),
    (lambda x, made: made(np.ones(4)).__iadd__(x), ValueError, "does not fit"),
    (lambda x, made: x.mising, AttributeError, "no attribute 'mising'"),
)
REFUSED_HERE: tuple[Any, ...] = (
    (lambda x, made: x.reshape(4, 6), AttributeError, r"use numpy.asarray\(a\).reshape"),
    (lambda x, made: x.tolist(), AttributeError, r"use numpy.asarray\(a\).tolist"),
    (lambda x, made: x.astype(str), ValueError, "matrices are of"),
    (lambda x, made: divmod(x, 2), TypeError, "divmod does not work on blocks"),
    (lambda x, made: np.add.reduce(x, 0), TypeError, "add with axis with reduce does not"),
    (lambda x, made: np.add(x, 1, where=x > 0), TypeError, "add with where does not work"),
    (at_place, TypeError, "add with at does not"),
    (local, TypeError, "out has to be a matrix"),
    (lambda x, made: np.clip(x, 0, 1, out=np.ones((6, 4))), TypeError, "out has to be a matrix"),
    (lambda x, made: np.matmul(x, x.T, out=np.ones((6, 6))), TypeError, "out has to be a matrix"),
    (lambda x, made: np.copyto(x, 1), ValueError, "read-only"),
)


def same(found: Any, due: Any) -> bool:
    if isinstance(due, tuple | list):
        return len(found) == len(due) and all(map(same, found, due))
    if isinstance(due, str):
        return bool(found == due)
    found, due = np.asarray(found), np.asarray(due)
    return (found.shape, found.dtype) == (due.shape, due.dtype) and np.allclose(found, due)


@contract(ranks=(1, 2, 3))
def test_programs_of_users_do_as_with_numpy(ctx: Any) -> None:
    for layout in ("rows", "columns", "grid"):
        for number, program in enumerate((*SKILLED, *CARELESS)):
            due = program(X.copy(), np.copy)
            found = program(pm.array(ctx, X, layout), lambda values: pm.array(ctx, values))
            assert same(found, due), number


@contract(ranks=(1, 2, 3))
def test_programs_of_users_are_refused_by_name(ctx: Any) -> None:
    x = pm.array(ctx, X)
    for number, (program, kind, text) in enumerate((*REFUSED, *REFUSED_HERE)):
        with pytest.raises(kind, match=text):
            program(x, lambda values: pm.array(ctx, values))
        if number < len(REFUSED):
            with pytest.raises((ValueError, IndexError, TypeError, AttributeError)):
                program(X.copy(), np.copy)
        else:
            program(X.copy(), np.copy)
        assert np.array_equal(np.asarray(x), X)  # nothing was changed, and ranks are in step


@contract(ranks=2)
def test_there_are_no_views(ctx: Any) -> None:
    x = pm.array(ctx, X)
    for copied in (x.T, x[0], x[:2]):
        np.add(copied, 1, out=copied)
    assert np.array_equal(np.asarray(x), X)

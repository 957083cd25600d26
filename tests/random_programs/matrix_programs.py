"""Programs of matrix operations, which ranks do step by step beside NumPy, which is the oracle.

What NumPy refuses has to be refused by matrices, too, on all ranks, and the program goes on. What
matrices refuse, and NumPy does not, is in REFUSED; what only matrices do, in EXTRA.
"""

from __future__ import annotations

import operator
import re
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from matrix_steps import KINDS, first_value

import pgasdl.matrix as pm
from pgasdl import loopback
from pgasdl.errors import BufferRefusedError, LayoutError, PgasError, PlanError

Matrix = pm.DistributedMatrix | pm.DistributedVector
STORED = (KINDS["float16"], KINDS["bfloat16"])
# Bits of these depend on how many elements NumPy computes at once.
ROUNDED = [
    "exp",
    "tanh",
    "sqrt",
    "power",
    "ipow",
    "hypot",
    "arctan2",
    "log1p",
    "divide",
    "itruediv",
    "reciprocal",
]
ROUNDED_STEPS = ["norm", "product", "turned_product", "product_out", "softmax"]


class Difference(NamedTuple):
    """Where matrices and NumPy differ on purpose: an error with this text on one side."""

    error: type[Exception] | tuple[type[Exception], ...]
    text: str  # a regular expression
    why: str


REFUSED = (
    Difference(
        BufferRefusedError, "matrices are of", "a result of a dtype that matrices do not have"
    ),
    Difference(LayoutError, "its original", "replicas are read-only"),
    Difference(BufferRefusedError, "bfloat16 into float16", "their product is float32 in NumPy"),
    Difference(PlanError, "integers", "what is moved may change its precision, not its kind"),
    Difference(LayoutError, r"a product of shapes .*\(\)", "dot with a number is no product"),
    Difference(LayoutError, "a product of shape .* into", "products are not spread over out"),
    Difference(LayoutError, "matrices have two at most", "more dimensions"),
    Difference(LayoutError, "a vector has no triangle", "NumPy makes a matrix of its rows"),
    Difference(LayoutError, "an outer product is of vectors", "NumPy makes vectors of matrices"),
    Difference(TypeError, "(not|got) '?complex", "the real part of complex numbers"),
    Difference(OverflowError, "too large to convert", "numbers that integers do not have"),
    Difference(TypeError, "and 'NoneType'", "NumPy takes None where there are no elements"),
    Difference(ValueError, "invalid literal|could not convert", "text, where nothing is set"),
    Difference(LayoutError, r"for elements of shape \(0,\)", "nothing is set"),
    Difference((OverflowError, ValueError), "cannot convert float", "inf and nan as integers"),
)
EXTRA = (
    Difference(OverflowError, "too large to convert to C long", "a huge number is true"),
    Difference(ValueError, "setting an array element with a sequence", "v[0] = [1]"),
    Difference(TypeError, "not 'list'|expected number, got numpy", "v[0] = [1]"),
    Difference(TypeError, "boolean array indexing assignment", "a[mask] = [[1, 2]]"),
)


class Near(NamedTuple):
    """What NumPy gives, up to rounding, and how large the terms are that were added up."""

    value: Any
    scale: Any


class Variable:
    """An array of NumPy, and the matrix that has to be equal."""

    def __init__(self, due: Any, here: Any) -> None:
        self.due, self.here = due, here


def run(program: Any) -> None:
    """Run a program on its ranks; AssertionError: matrices and NumPy differ, or two ranks do."""
    wrong: list[AssertionError] = []

    def rank(ctx: Any) -> list[str]:
        try:
            return Run(ctx, program).run()
        except AssertionError as error:
            wrong.append(error)
            raise

    try:
        outcomes = loopback.run(program[0], rank, timeout=30, log="error", **program[1])
    except PgasError:  # of those that went on
        if wrong:
            raise wrong[0] from None
        raise
    assert all(each == outcomes[0] for each in outcomes), f"ranks differ: {outcomes}"


def layout_of(name: str, shape: tuple[int, ...], size: int) -> Any:
    """Return a layout, of those that have names or others."""
    whole = (shape[0], shape[1] if len(shape) == 2 else 1)
    if name == "dealt":  # each tile takes its time in Python: there are a thousand at most
        tile = max(2, whole[0] // 32), max(3, whole[1] // 32)
        return pm.cyclic(whole, range(size), tile, 2 if size % 2 == 0 else 1)
    if name == "one":
        return pm.replicated(whole, [size - 1])
    return pm.columns(whole, [*range(size)][::-1][:3]) if name == "turned" else name


class Run:
    """A program on one rank."""

    def __init__(self, ctx: Any, program: Any) -> None:
        self.ctx = ctx
        _, _, pool, (m, n), made, self.steps = program
        if pool:
            ctx.pool(pool)
            pm.keep(ctx, pool // 2)
        self.variables: list[Variable] = []
        self.before: list[Any] = []  # of NumPy: local operands of a step
        for form, kind, layout, seed in made:
            sizes = {"m": min(m, n) if form == "mm" else m, "n": n, "1": 1}
            shape = tuple(sizes[each] for each in form)
            due = first_value(shape, KINDS[kind], seed)
            here = pm.array(ctx, due, layout_of(layout, shape, ctx.size))
            self.variables.append(Variable(due, here))

    def run(self) -> list[str]:
        """Do all steps, and return how each ended."""
        done = []
        with np.errstate(all="ignore"):
            for step in self.steps:
                try:
                    done.append(self.step(step))
                except AssertionError as error:
                    had = [(str(e.due.dtype), e.due.shape, str(e.here)) for e in self.variables]
                    raise AssertionError(f"{step}: {error}; of {had}") from error
            for each in self.variables:
                self.compare(each.due, each.here)
                close(each.due, np.asarray(each.here))
        return done

    def step(self, step: Any) -> str:
        """Do one step both ways, and compare."""
        do, *of = step = self.fitted(*step)
        self.before = [each.due.copy() for each in self.variables]
        due, found = (self.tried(do, Side(self, here), of) for here in (False, True))
        coarse = any(each.dtype in STORED for each in self.used(of))
        target = self.variables[of[_TARGETS[do]] % len(self.variables)] if do in _TARGETS else None
        rounded = self.rounded(step)
        text = f"{type(found).__name__}: {found}"
        if isinstance(found, Exception) or isinstance(due, Exception):
            self.judge(due, found)
            rounded = rounded or not (isinstance(found, Exception) and isinstance(due, Exception))
            found = text if isinstance(found, Exception) else "not refused"
        elif isinstance(found, Matrix):
            scale = abs(np.asarray(due, np.float64)) if rounded else None
            if isinstance(due, Near):
                due, scale = due
            assert isinstance(due, np.ndarray), "a matrix in place of a number"
            if do == "out" and coarse and scale is not None:
                # What is stored with less precision is computed in float32, or as out: NumPy rounds
                # to the dtype of the operands first, and overflows there.
                scale = np.where(np.isinf(due), np.finfo(np.float64).max, scale * 2.0**41)
            self.compare(due, found, scale)
            if do not in _TARGETS:
                target = self.keep(do, due, found)
            elif target is not None:
                assert found is target.here
            rounded, found = rounded or scale is not None, "a matrix"
        elif due is not None:
            scale = abs(np.asarray(due, np.float64)) if rounded else None
            if isinstance(due, Near):
                due, scale = due
            due = due[()] if type(due) is np.ndarray else due  # numbers, in place of no dimensions
            assert type(found) is type(due), f"{type(found)} for {type(due)}"
            close(np.asarray(due), np.asarray(found), scale)
        if target is not None and rounded and target.due.flags.writeable:
            target.due[...] = np.asarray(target.here)  # rounding is compared once
        for each in self.variables:
            self.compare(each.due, each.here)
        return str(found)

    def fitted(self, do: str, *of: Any) -> Any:
        """Return a step whose operands are variables that fit, if there are some."""
        if any(each.due.dtype in STORED for each in self.variables):  # computed in float32, or inf
            of = tuple(("scalar", 2) if _is_huge(each) else each for each in of)
        values = [n for n, each in enumerate(of) if type(each) is tuple and each[:1] in _VALUES]
        if do in _OF_ANY and not any(of[n][0] in ("var", "fit") for n in values):
            of = (*of[: values[0]], ("var", 0), *of[values[0] + 1 :])  # one has to be a matrix
        at = [n for n, each in enumerate(of) if type(each) is tuple and each[:1] == ("fit",)]
        first = next((n for n, each in enumerate(of) if n in at), None)
        if first is None:
            return do, *of
        changed = of[_TARGETS[do]] if do in ("in_place", "out") else None
        model = self.variables[(of[first][1] if changed is None else changed) % len(self.variables)]
        found = list(of)
        for n in at:
            fits = [j for j, each in enumerate(self.variables) if self._fits(do, model, each)]
            alone = n == first and changed is None
            place = of[n][1] if alone or not fits else fits[of[n][1] % len(fits)]
            found[n] = ("var", place)
        return do, *found

    def _fits(self, do: str, model: Variable, other: Variable) -> bool:
        a, b = model.due, other.due
        if do.startswith("product"):
            return bool(a.shape[-1] == b.shape[0] and b.ndim == 2)
        try:
            whole = np.broadcast_shapes(a.shape, b.shape)
        except ValueError:
            return False
        into = whole == a.shape and np.can_cast(b.dtype, a.dtype, "same_kind")
        return into or do not in ("in_place", "out")

    def tried(self, do: str, side: Side, of: Any) -> Any:
        """Return what a step makes, or the error that it raises."""
        try:
            return getattr(side, do)(*of)
        except (PgasError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError,
                NotImplementedError) as error:  # fmt: skip
            if isinstance(error, PgasError) and not isinstance(error, ValueError):
                raise
            return error

    def judge(self, due: Any, found: Any) -> None:
        """Require that both sides refuse, or that a difference is known."""
        if isinstance(due, Exception) and isinstance(found, Exception):
            return
        one, known = (found, REFUSED) if isinstance(found, Exception) else (due, EXTRA)
        if not any(
            isinstance(one, each.error) and re.search(each.text, str(one)) for each in known
        ):
            told = "refused" if one is found else "NumPy refuses"
            raise AssertionError(f"{told}: {type(one).__name__}: {one}; {due!r} {found!r}") from one

    def keep(self, do: str, due: Any, found: Any) -> Variable | None:
        """Add a variable, unless the result is one already."""
        for each in self.variables:
            if each.here is found:
                assert np.shares_memory(each.due, due) or not due.size
                return each
        if do == "replica":
            due = due.view()
            due.flags.writeable = False
        if len(self.variables) >= 16 or due.size > 20000:
            return None
        self.variables.append(Variable(due, found))
        return self.variables[-1]

    def rounded(self, step: Any) -> bool:
        """Whether the result may differ in its last bits."""
        do, *of = step
        return (
            do in ROUNDED_STEPS
            or of[0] in (*ROUNDED, "mean", "var", "std", "imatmul")
            or do in ("axpy", "touch")
            or any(each.dtype in STORED for each in self.used(of))
        )

    def used(self, of: Any) -> list[Any]:
        """Return the arrays that a step names."""
        places = [each[1] if type(each) is tuple and len(each) == 2 else each for each in of]
        return [self.variables[p % len(self.variables)].due for p in places if type(p) is int]

    def compare(self, due: Any, found: Any, scale: Any = None) -> None:
        """Compare this rank's blocks: nothing moves, but into a replica."""
        assert found.shape == due.shape, f"shape {found.shape} for {due.shape}"
        assert found.dtype == due.dtype, f"dtype {found.dtype} for {due.dtype}"
        assert found.size == due.size and found.ndim == due.ndim
        scale = None if scale is None else np.reshape(scale, (due.shape[0], -1)) if due.size else 0
        every = 1 + len(found.layout.blocks) // 5000  # all of a large product would take minutes
        for block, mine in islice(found.blocks(), 0, None, every):
            of = None if scale is None else scale[block.where]
            close(due.reshape(due.shape[0], -1)[block.where], mine, of)


def close(due: Any, found: Any, scale: Any = None) -> None:
    """Require equal elements; with ``scale``, equal but for rounding of terms so large."""
    assert (due.shape, due.dtype) == (found.shape, found.dtype), f"{found!r} for {due!r}"
    if due.dtype.kind in "biu":
        assert np.array_equal(due, found), f"{found!r} for {due!r}"
        return
    d, f = due.astype(np.float64), found.astype(np.float64)
    right = (d == f) | (np.isnan(d) & np.isnan(f))
    if scale is not None:
        import ml_dtypes

        about: Any = ml_dtypes.finfo(due.dtype)
        large = np.where(np.isfinite(scale), scale, 0)
        right |= abs(d - f) <= 16 * float(about.eps) * large + 4 * float(about.smallest_subnormal)
        right |= large > float(about.max) / 8  # it may overflow on the way
    assert right.all(), f"{found!r} for {due!r}"


def _is_huge(value: Any) -> bool:
    if type(value) is not tuple or value[:1] != ("scalar",) or type(value[1]) not in (int, float):
        return False
    return bool(6e4 < abs(value[1]) < float("inf"))


_VALUES = (("var",), ("fit",), ("local",), ("list",), ("scalar",))
_OF_ANY = ("binary", "out", "product", "product_out", "where", "concatenate", "outer")
# Which operand of a step is changed.
_TARGETS = {"in_place": 1, "out": 1, "product_out": 0, "set": 0, "axpy": 0, "touch": 0}


class Side:
    """How steps are done: with matrices here, or with NumPy's arrays."""

    def __init__(self, run: Run, here: bool) -> None:
        self._run, self._here = run, here

    def _var(self, place: int) -> Any:
        found = self._run.variables[place % len(self._run.variables)]
        return found.here if self._here else found.due

    def _value(self, value: Any) -> Any:
        kind, what = value
        if kind == "scalar":
            return what
        if kind == "var":
            return self._var(what)
        due = self._run.before[what % len(self._run.variables)].copy()
        return due.tolist() if kind == "list" and due.dtype.kind != "V" else due

    def _values(self, *values: Any) -> list[Any]:
        return [*map(self._value, values)]

    def binary(self, name: str, a: Any, b: Any) -> Any:
        return getattr(np, name)(*self._values(a, b))

    def unary(self, name: str, a: int) -> Any:
        return getattr(np, name)(self._var(a))

    def in_place(self, name: str, a: int, b: Any) -> Any:
        return getattr(operator, name)(self._var(a), self._value(b))

    def out(self, name: str, out: int, a: Any, b: Any) -> Any:
        return getattr(np, name)(*self._values(a, b), out=self._var(out))

    def reduce(self, name: str, method: bool, a: int, axis: Any, keepdims: bool) -> Any:
        x = self._var(a)
        if self._here or name not in ("sum", "mean", "prod", "var", "std") or x.dtype.kind in "biu":
            if method and not (x.dtype == KINDS["bfloat16"] and not self._here):
                return getattr(x, name)(axis=axis, keepdims=keepdims)
            return getattr(np, name)(x, axis=axis, keepdims=keepdims)
        exact = getattr(np, name)(x.astype(np.float64), axis=axis, keepdims=keepdims)
        other = "max" if name in ("var", "std") and x.size else name
        scale = getattr(np, other)(abs(x.astype(np.float64)), axis=axis, keepdims=keepdims)
        scale = 4 * scale * scale + scale if name in ("var", "std") else scale
        return Near(exact.astype(x.dtype), scale)

    def norm(self, method: bool, a: int, axis: Any) -> Any:
        x = self._var(a)
        if self._here:
            return x.norm(axis) if method else np.linalg.norm(x, axis=axis)
        dtype = (
            np.float64 if x.dtype.kind in "biu" else np.float32 if x.dtype in STORED else x.dtype
        )
        exact = np.linalg.norm(x.astype(np.float64), axis=axis)
        return Near(exact.astype(dtype), exact)

    def _product(self, name: str, a: Any, b: Any) -> Any:
        if self._here:
            return getattr(np, name)(a, b)
        a, b = np.asarray(a), np.asarray(b)
        dtype = getattr(np, name)(np.empty_like(a), np.empty_like(b)).dtype
        if (stays := np.result_type(a, b)) == KINDS["bfloat16"]:
            dtype = stays  # NumPy makes float32 of it
        if dtype.kind in "biuO":
            return getattr(np, name)(a, b)
        wide = [each.astype(np.float64) for each in (a, b)]
        found = getattr(np, name)(*wide)
        if not all(np.isfinite(each).all() for each in wide):
            return Near(found.astype(dtype), np.full(found.shape, 1e308))  # BLAS may skip zeros
        return Near(found.astype(dtype), getattr(np, name)(*map(abs, wide)))

    def product(self, name: str, a: Any, b: Any) -> Any:
        return self._product(name, *self._values(a, b))

    def turned_product(self, a: int, b: int, c: bool, d: bool, layout: str) -> Any:
        x, y = self._var(a), self._var(b)
        if x.ndim == 1 or y.ndim == 1:
            return self._product("matmul", x, y)
        if not self._here:
            return self._product("matmul", x.T if c else x, y.T if d else y)
        shape = x.shape[1 if c else 0], y.shape[0 if d else 1]
        where = layout_of(layout, shape, self._run.ctx.size)
        return pm.matmul(x, y, transpose_a=c, transpose_b=d, layout=where)

    def product_out(self, out: int, a: Any, b: Any) -> Any:
        a, b = self._values(a, b)
        goal = self._var(out)
        if self._here:
            return np.matmul(a, b, out=goal)
        found = self._product("matmul", a, b)
        np.matmul(a, b, out=goal)
        return (
            Near(found.value.astype(goal.dtype), found.scale) if isinstance(found, Near) else goal
        )

    def whole(self, name: str, a: int) -> Any:
        x = self._var(a)
        if name == "same" or (name in ("T", "transpose") and x.ndim == 1):
            return x
        if name in ("T", "copy"):
            return x.T.copy() if name == "T" else x.copy()  # no views
        return self._copied(getattr(np, name)(x))

    def _copied(self, found: Any) -> Any:
        return found.copy() if isinstance(found, np.ndarray) and found.ndim else found

    def softmax(self, a: int) -> Any:
        x = self._var(a)
        if self._here or x.ndim == 1:
            return x.softmax()
        wide = x.astype(np.float64)
        if not x.size:
            wide = np.zeros(x.shape)
        else:
            wide = np.exp(wide - wide.max(1, keepdims=True))
            wide /= wide.sum(1, keepdims=True)
        return Near(wide.astype(x.dtype if x.dtype.kind not in "biu" else np.float64), abs(wide))

    def touch(self, a: int, value: int) -> Any:
        """Blocks are written to, and all ranks tell it."""
        x = self._var(a)
        if not self._here:
            if not x.flags.writeable:
                raise ValueError("read-only")
            x[...] = value
            return x
        x.require_original()
        for _, mine in x.blocks():
            mine[...] = value
        x.changed()
        return x

    def astype(self, a: int, kind: str) -> Any:
        return self._var(a).astype(KINDS[kind])

    def remap(self, a: int, layout: str) -> Any:
        x = self._var(a)
        return x.remap(self._layout(layout, x)) if self._here else x.copy()

    def remap_meanwhile(self, a: int, layout: str, b: int) -> Any:
        x = self._var(a)
        if not self._here:
            return x.copy()
        handle = x.remap_async(self._layout(layout, x))
        self._var(b).T  # noqa: B018 (computed, and compared nowhere)
        return handle.wait()

    def narrow(self, a: int, layout: str, kind: str) -> Any:
        x = self._var(a)
        if self._here:
            return x.remap(self._layout(layout, x), KINDS[kind])
        return x.astype(KINDS[kind])

    def replica(self, a: int, layout: str) -> Any:
        x = self._var(a)
        return x.replica(self._layout(layout, x)) if self._here else x

    def _layout(self, layout: str, x: Any) -> Any:
        return layout_of(layout, x.shape, self._run.ctx.size)

    def where(self, *values: Any) -> Any:
        return np.where(*self._values(*values))

    def clip(self, a: int, low: Any, high: Any) -> Any:
        return np.clip(self._var(a), self._value(low), self._value(high))

    def full_like(self, a: int, value: Any) -> Any:
        given = self._value(value)
        return np.full_like(self._var(a), given)

    def _key(self, key: Any, x: Any) -> Any:
        if not (isinstance(key, tuple) and key[:1] == ("mask",)):
            return key
        name = key[1]
        if name in ("positive", "none"):
            return x > 0 if name == "positive" else x != x
        if name == "rows":
            return np.arange(x.shape[0]) % 2 == 0
        return (
            np.ones(x.shape, bool)
            if name == "all"
            else (slice(None), np.arange(x.shape[-1]) % 2 == 0)
        )

    def get(self, a: int, key: Any) -> Any:
        x = self._var(a)
        found = x[self._key(key, x)]
        return found.copy() if isinstance(found, np.ndarray) else found

    def set(self, a: int, key: Any, value: Any) -> Any:
        x = self._var(a)
        key, value = self._key(key, x), self._value(value)
        if isinstance(value, list) and x.dtype == bool:
            value = np.array(value)  # of a list NumPy asks whether it is empty
        x[key] = value
        return x

    def concatenate(self, a: Any, b: Any, axis: Any) -> Any:
        return np.concatenate(self._values(a, b), axis=axis)

    def take(self, a: int, places: Any, axis: Any) -> Any:
        return np.take(self._var(a), places, axis=axis)

    def triangle(self, name: str, a: int, k: int) -> Any:
        return getattr(np, name)(self._var(a), k)

    def shaped(self, name: str, a: int, axis: int) -> Any:
        return self._copied(getattr(np, name)(self._var(a), axis))

    def outer(self, a: Any, b: Any) -> Any:
        return np.outer(*self._values(a, b))

    def axpy(self, a: int, alpha: float, b: int) -> Any:
        x, y = self._var(a), self._var(b)
        if self._here:
            return x.axpy(alpha, y)
        return operator.iadd(x, y * alpha)

    def ask(self, what: str, a: int) -> Any:
        x = self._var(a)
        if what in ("bool", "float", "int"):
            return {"bool": bool, "float": float, "int": int}[what](x)
        if what == "len" or x.shape[0] > 100:  # a row is a call of all ranks
            return len(x)
        return [np.array(each) for each in x] if what == "iter" else (1 in x)

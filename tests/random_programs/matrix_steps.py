"""Steps of matrix programs, as hypothesis draws them: names, places of variables, and values."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from pgasdl.buffers import DTYPES

KINDS = {**DTYPES, "bool": np.dtype(bool)}
LAYOUTS = ("rows", "columns", "grid", "cyclic", "replicated", "dealt", "one", "turned")
SIZES = (0, 1, 1, 2, 3, 5, 7, 13)
FORMS = ("mn", "mn", "mn", "nm", "1n", "m1", "n", "m", "11", "1", "mm")
_BINARY = """
add subtract multiply divide floor_divide remainder power maximum minimum less less_equal equal
not_equal greater logical_and logical_or bitwise_and bitwise_xor left_shift hypot arctan2
copysign fmin gcd
"""
BINARY = _BINARY.split()
_UNARY = """
negative positive absolute exp tanh sqrt square sign floor rint isnan isfinite logical_not
invert log1p reciprocal signbit
"""
UNARY = _UNARY.split()
IN_PLACE = [
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "iand",
    "ior",
    "ixor",
    "imatmul",
]
REDUCTIONS = [
    "sum",
    "sum",
    "max",
    "min",
    "mean",
    "prod",
    "any",
    "all",
    "var",
    "std",
    "argmax",
    "argmin",
]
SCALARS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, True, 0.5, -2.0, 1e30, float("inf"), float("nan"), 2**40, 2**70, 1j, "text",
    None, np.float32(3), np.float64(0.25), np.float16(2), np.int64(5), np.int32(-3),
    np.bool_(False), np.uint8(7),
)  # fmt: skip

_VAR = st.integers(0, 7)  # modulo the number of variables
_VALUE = st.one_of(
    st.tuples(st.sampled_from(["fit", "fit", "var"]), _VAR),
    st.tuples(st.just("fit"), _VAR),
    st.tuples(st.sampled_from(["local", "list"]), _VAR),
    st.tuples(st.just("scalar"), st.sampled_from(SCALARS)),
)
_AXIS = st.sampled_from([None, None, 0, 1, -1, -2, 2, (0, 1), (1, 0), (-1,), (), (0, 0), 1.0])
_FLAG, _LAYOUT, _KIND = st.booleans(), st.sampled_from(LAYOUTS), st.sampled_from([*KINDS])


def _keys() -> st.SearchStrategy[Any]:
    number = st.one_of(st.integers(-4, 4), st.sampled_from([13, -14]))
    edge = st.none() | st.integers(-8, 8)
    cut = st.builds(slice, edge, edge, st.sampled_from([None, None, None, 1, 2, -1, -3, 0]))
    some = st.lists(st.integers(-3, 3), max_size=3)
    odd = st.sampled_from([None, True, False, 1.5, "x", np.int64(1), np.uint8(0)])
    single = st.one_of(number, cut, cut, cut, st.just(...), some, odd)
    return st.one_of(
        single,
        st.tuples(single),
        st.tuples(single, single),
        st.tuples(cut, cut),
        st.tuples(single, single, single),
        st.just(()),
        st.tuples(st.just("mask"), st.sampled_from(["positive", "all", "rows", "columns", "none"])),
    )


def _steps() -> st.SearchStrategy[Any]:
    def step(do: str, *of: st.SearchStrategy[Any], weight: int = 1) -> list[Any]:
        return [st.tuples(st.just(do), *of)] * weight

    among = st.sampled_from
    return st.one_of(
        *step("binary", among(BINARY), _VALUE, _VALUE, weight=3),
        *step("unary", among(UNARY), _VAR),
        *step("in_place", among(IN_PLACE), _VAR, _VALUE, weight=2),
        *step("out", among(BINARY), _VAR, _VALUE, _VALUE),
        *step("reduce", among(REDUCTIONS), _FLAG, _VAR, _AXIS, _FLAG, weight=2),
        *step("norm", _FLAG, _VAR, among([None, None, 0, 1, -1, 2])),
        *step("product", among(["matmul", "dot"]), _VALUE, _VALUE, weight=2),
        *step("turned_product", _VAR, _VAR, _FLAG, _FLAG, _LAYOUT),
        *step("product_out", _VAR, _VALUE, _VALUE),
        *step("whole", among(["T", "copy", "zeros_like", "transpose", "same"]), _VAR),
        *step("softmax", _VAR),
        *step("touch", _VAR, among([1, 0])),
        *step("astype", _VAR, _KIND),
        *step("remap", _VAR, _LAYOUT),
        *step("remap_meanwhile", _VAR, _LAYOUT, _VAR),
        *step("narrow", _VAR, _LAYOUT, _KIND),
        *step("replica", _VAR, _LAYOUT),
        *step("where", _VALUE, _VALUE, _VALUE),
        *step("clip", _VAR, _VALUE, _VALUE),
        *step("full_like", _VAR, _VALUE),
        *step("get", _VAR, _keys(), weight=2),
        *step("set", _VAR, _keys(), _VALUE, weight=2),
        *step("concatenate", _VALUE, _VALUE, _AXIS),
        *step("take", _VAR, st.lists(st.integers(-3, 3), max_size=4), among([0, 1, -1, 2, None])),
        *step("triangle", among(["tril", "triu"]), _VAR, st.integers(-3, 3)),
        *step("shaped", among(["expand_dims", "squeeze"]), _VAR, among([0, 1, -1, -2, 2])),
        *step("outer", _VALUE, _VALUE),
        *step("axpy", _VAR, among([0, 1, -2, 0.5]), _VAR),
        *step("ask", among(["bool", "float", "int", "len", "iter", "in"]), _VAR),
    )


_SIZE, _LONG = st.sampled_from(SIZES), st.just(2053)  # of which ranks reduce rows by a plan
# Settings of loopback: as it is, unmapped, and with what the adversary does.
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"mapped": False},
    {"seed": 1, "delay": 2, "reorder": True, "late_source": True},
)
# Ranks, loopback's settings, bytes of the pool, two sizes, variables (form, dtype, layout, seed),
# and steps.
PROGRAMS = st.tuples(
    st.integers(1, 4),
    st.sampled_from(WAYS),
    st.sampled_from([0, 0, 1 << 12, 1 << 20]),
    st.one_of(
        *[st.tuples(_SIZE, _SIZE)] * 10, st.tuples(_SIZE, _LONG), st.tuples(_LONG, st.just(2))
    ),
    st.lists(
        st.tuples(st.sampled_from(FORMS), _KIND, _LAYOUT, st.integers(0, 9)), min_size=2, max_size=5
    ),
    st.lists(_steps(), min_size=4, max_size=14),
)


def first_value(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> Any:
    """Return small numbers; of seed 0 also zeros of both signs, and what is not finite."""
    dice = np.random.default_rng(seed)
    if dtype.kind == "b":
        return dice.random(shape) < 0.5
    whole = dtype.kind in "iu"
    values = dice.integers(-6, 7, shape) / (1 if whole else 2)
    if seed == 0 and not whole:
        odd = [np.nan, np.inf, -np.inf, -0.0, 6e4]
        values = np.where(dice.random(shape) < 0.3, dice.choice(odd, shape), values)
    return values.astype(dtype)

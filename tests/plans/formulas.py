"""The closed forms as the papers print them, which tests compare with the plans' own steps."""

from __future__ import annotations

from fractions import Fraction

from pgasdl.plans.cost import Number


def log2(p: int) -> int:
    """Return the rounds of a binomial tree of ``p`` ranks: the logarithm, rounded up."""
    return (p - 1).bit_length()


def binomial_reduce(p: int, t_b: Number) -> Number:
    """S-Caffe (1): T(Bin) = log(P) t(b)."""
    return log2(p) * t_b


def chunked_chain_reduce(p: int, n: int, t_c: Number) -> Number:
    """S-Caffe (2): T(CC) = (n + P - 2) t(c), with n chunks of b / n bytes."""
    return (n + p - 2) * t_c


def halving(
    p: int,
    q: int,
    n: Number,
    alpha: Number,
    beta1: Number,
    beta2: Number,
    gamma: Number,
    *,
    round_robin: bool,
) -> Number:
    """SwCaffe (3) and (5): reduce-scatter of ``n`` bytes on ``p`` nodes, ``q`` in a supernode."""
    share = Fraction(p - 1, p)
    return doubling(p, q, n, alpha, beta1, beta2, round_robin=round_robin) + share * n * gamma


def doubling(
    p: int, q: int, n: Number, alpha: Number, beta1: Number, beta2: Number, *, round_robin: bool
) -> Number:
    """SwCaffe (4) and (6): all-gather of ``n`` bytes."""
    if round_robin:
        inside, across = p - Fraction(p, q), Fraction(p, q) - 1
    else:
        inside, across = Fraction(q - 1), Fraction(p - q)
    return log2(p) * alpha + (inside * beta1 + across * beta2) * n / p


def halving_doubling(
    p: int,
    q: int,
    n: Number,
    alpha: Number,
    beta1: Number,
    beta2: Number,
    gamma: Number,
    *,
    round_robin: bool,
) -> Number:
    """SwCaffe (2): both phases."""
    down = halving(p, q, n, alpha, beta1, beta2, gamma, round_robin=round_robin)
    return down + doubling(p, q, n, alpha, beta1, beta2, round_robin=round_robin)


def gdraa(p: int, n: Number, alpha: Number, beta: Number, gamma: Number) -> Number:
    """MiMatrix's two steps: 2 latencies, (P-1)/P n bytes each way twice, (P-1)/P n additions."""
    return 2 * alpha + Fraction(p - 1, p) * n * (2 * beta + gamma)

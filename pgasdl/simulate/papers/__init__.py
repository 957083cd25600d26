"""The source papers' experiments, simulated, with the papers' figures beside ours."""

from __future__ import annotations

from collections.abc import Callable

from pgasdl.simulate.papers import caffegpi, dmath, mimatrix, s_caffe, swcaffe
from pgasdl.simulate.papers.study import Study

STUDIES: dict[str, Callable[[], Study]] = {
    "s-caffe": s_caffe.study,
    "swcaffe": swcaffe.study,
    "mimatrix": mimatrix.study,
    "caffegpi": caffegpi.study,
    "dmath": dmath.study,
}

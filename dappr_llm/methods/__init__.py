"""The registry of methods: name in a recipe → class, and how to build one from its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .base import NEEDS, HeadInfo, Method, Progress, get_method, name_of, served_by
from .cross_entropy import CrossEntropy
from .daedl import DAEDL
from .dappr import DAPPr
from .duq import DUQ
from .edl import EDL
from .fedl import FEDL
from .ibedl import IBEDL
from .iedl import IEDL
from .mc_dropout import MCDropout
from .natpn import NatPN
from .postnet import PostNet
from .prior_network import PriorNetwork
from .redl import REDL
from .rsnn import RSNN

METHODS: dict[str, Callable[..., Method]] = {
    "ce": CrossEntropy,
    "mc_dropout": MCDropout,
    "duq": DUQ,
    "kl_pn": PriorNetwork,
    "rkl_pn": partial(PriorNetwork, reverse=True),
    "postnet": PostNet,
    "natpn": NatPN,
    "rs_nn": RSNN,
    "edl": EDL,
    "edl_spurious": partial(EDL, regulariser="spurious"),
    "iedl": IEDL,
    "redl": REDL,
    "daedl": DAEDL,
    "fedl": FEDL,
    "ib_edl": IBEDL,
    "dappr": DAPPr,
    "dappr_no_reg": partial(DAPPr, regulariser="none"),
    "dappr_kl": partial(DAPPr, regulariser="kl"),
    "dappr_exp": partial(DAPPr, evidence="exp", regulariser="none"),
}

__all__ = ["METHODS", "NEEDS", "HeadInfo", "Method", "Progress", "get_method", "name_of", "served_by"]

"""The registry of methods: name in a recipe → class, and how to build one from its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..core.errors import UserError, nearest
from .base import NEEDS, HeadInfo, Method, Progress
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
}


def get_method(name: str | Method, **options: Any) -> Method:
    """
    Build a method from its name and hyperparameters.

    Args:
        name (`str` or `Method`):
            A key of `METHODS`; a `Method` object is returned unchanged.
        options:
            Hyperparameters: fields of the method's dataclass.
    """
    if isinstance(name, Method):
        return name
    if name not in METHODS:
        raise UserError(f"Unknown method {name!r}; {nearest(name, METHODS)}")
    valid = METHODS[name]().options()
    for key in options:
        if key not in valid:
            raise UserError(f"Method {name!r} has no option {key!r}; {nearest(key, valid)}")
    return METHODS[name](**options)


def served_by(needs: frozenset[str]) -> list[str]:
    """Names of the methods whose `needs` are all in `needs`, hence those that a backend offering these can train."""
    return [name for name, build in METHODS.items() if build().needs <= needs]


def name_of(method: Method) -> str:
    """The registry name that builds this method; of several (`edl`, `edl_spurious`), that with most fixed fields."""
    found: dict[str, int] = {}
    for name, build in METHODS.items():
        fixed = getattr(build, "keywords", {})
        built = getattr(build, "func", build)
        if type(method) is built and all(getattr(method, key) == value for key, value in fixed.items()):
            found[name] = len(fixed)
    if not found:
        raise UserError(f"{type(method).__name__} is not in METHODS: add it there, so that checkpoints can name it")
    return max(found, key=lambda name: found[name])


__all__ = ["METHODS", "NEEDS", "HeadInfo", "Method", "Progress", "get_method", "name_of", "served_by"]

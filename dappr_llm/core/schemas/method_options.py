"""
Options of every method with their ranges, by the method's name in a recipe.

A method checks itself against its schema when it is built, and a recipe is checked before torch is imported.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, with_config
from typing_extensions import TypedDict

from .types import STRICT, Count, Dropout, Natural, Positive, Seed, Weight

Schedule = Literal["warmup", "linear", "constant"]
Passes = Annotated[int, Field(ge=1, le=10_000)]
OnePass = Annotated[int, Field(ge=1, le=1)]  # scores of these methods cannot be averaged over passes
Width = Annotated[int, Field(ge=1, le=65_536)]
Layers = Annotated[int, Field(ge=1, le=1000)]


@with_config(STRICT)
class CrossEntropyOptions(TypedDict, total=False):
    passes: Passes


@with_config(STRICT)
class MCDropoutOptions(TypedDict, total=False):
    passes: Annotated[int, Field(ge=2, le=10_000)]  # one pass is cross-entropy


@with_config(STRICT)
class DUQOptions(TypedDict, total=False):
    passes: OnePass
    length_scale: Positive
    penalty_weight: Weight
    decay: Dropout
    centroid_dim: Width | None
    centroid_std: Positive


@with_config(STRICT)
class PriorNetworkOptions(TypedDict, total=False):
    passes: Passes
    precision: Positive
    ood_weight: Weight
    reverse: bool


@with_config(STRICT)
class PostNetOptions(TypedDict, total=False):
    passes: Passes
    latent_dim: Width
    layers: Layers
    entropy_weight: Weight
    budget: Literal["counts", "one", "log", "share"]


@with_config(STRICT)
class NatPNOptions(TypedDict, total=False):
    passes: OnePass
    latent_dim: Width
    layers: Layers
    entropy_weight: Weight
    budget: Literal["normal", "constant", "exp_half", "exp"]
    flow_warmup_epochs: Weight
    flow_finetune_steps: Natural


@with_config(STRICT)
class RSNNOptions(TypedDict, total=False):
    passes: OnePass
    budget: Annotated[int, Field(ge=0, le=100_000)]
    mass_weight: Weight
    sum_weight: Weight
    embedding: Literal["tsne", "pca"]
    embedding_rows: Count


@with_config(STRICT)
class ScheduledOptions(TypedDict, total=False):
    passes: Passes
    reg_weight: Weight | None  # what is null, or left out, is chosen when training starts
    schedule: Schedule | None
    warmup_epochs: Weight | None


class EDLOptions(ScheduledOptions, total=False):
    regulariser: Literal["kl", "spurious", "none"]


class IEDLOptions(ScheduledOptions, total=False):
    fisher_weight: Weight


class REDLOptions(ScheduledOptions, total=False):
    prior: Positive
    cross_weight: Positive


class DAEDLOptions(ScheduledOptions, total=False):
    passes: OnePass  # type: ignore[misc]
    covariance: Literal["auto", "full", "shared"]
    shrinkage: Annotated[float, Field(ge=0, le=1)] | None


@with_config(STRICT)
class FEDLOptions(TypedDict, total=False):
    passes: OnePass
    hidden_dim: Width


@with_config(STRICT)
class IBEDLOptions(TypedDict, total=False):
    passes: Passes
    beta: Weight
    draws: Annotated[int, Field(ge=1, le=10_000)]
    scale_penalty: Weight
    noise_seed: Seed


class DAPPrOptions(ScheduledOptions, total=False):
    regulariser: Literal["spurious", "kl", "none"]
    evidence: Literal["softplus", "exp"]


METHOD_OPTIONS: dict[str, Any] = {
    "ce": CrossEntropyOptions,
    "mc_dropout": MCDropoutOptions,
    "duq": DUQOptions,
    "kl_pn": PriorNetworkOptions,
    "rkl_pn": PriorNetworkOptions,
    "postnet": PostNetOptions,
    "natpn": NatPNOptions,
    "rs_nn": RSNNOptions,
    "edl": EDLOptions,
    "edl_spurious": EDLOptions,
    "iedl": IEDLOptions,
    "redl": REDLOptions,
    "daedl": DAEDLOptions,
    "fedl": FEDLOptions,
    "ib_edl": IBEDLOptions,
    "dappr": DAPPrOptions,
    "dappr_no_reg": DAPPrOptions,
    "dappr_kl": DAPPrOptions,
    "dappr_exp": DAPPrOptions,
}

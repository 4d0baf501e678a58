"""
NatPN: natural posterior network with a single density (Charpentier et al. 2022, https://arxiv.org/abs/2105.04471).

    l = linear(features),   chi = softmax(linear(l)),   q: one radial flow over l
    alpha = 1 + n chi,   log n = log q(l) + budget
    loss  = digamma(alpha0) - digamma(alpha_y) - entropy_weight * entropy(Dir(alpha))
    warm-up and final phase, in which only the flow is trained:   loss = -log q(l)

Needs `features` and `fit_after` (the final phase); the model has no linear classifier of its own. Scores: aleatoric
`1 - max alpha/alpha0`, epistemic `-log q(l)`, which ranks as `K/alpha0` does but has no ties where alpha0 saturates.
Where PostNet has one density per class, NatPN has one for all, so that its cost hardly grows with K.

Differs from the paper's code, whose three phases are separate trainings with early stopping. Here the warm-up is the
beginning of the run, at most a tenth of it. The final phase computes the features of the trained model once and fits
the flow to them in a fixed number of steps: a flow converges far more slowly than an encoder, and after a short run it
would still assign more density to the space between the classes, where out-of-distribution images lie, than to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.outputs import Outputs, Prediction
from ..core.schemas.method_options import NatPNOptions
from .base import HeadInfo, Method, Progress
from .dirichlet import clamp_keeping_gradient
from .flows import RadialFlows
from .postnet import LIMIT, posterior_terms

_FIT_ROWS = 1024
_FIT_RATE = 1e-2  # the authors' code has 1e-3; at 2e-3 the flow took about four times as many steps


def log_budget(dim: int, kind: str) -> float:
    """The constant added to the log-density; `"normal"` offsets how a Gaussian's density falls with its dimension."""
    return {"normal": math.log(4 * math.pi) / 2 * dim, "constant": 0.0, "exp_half": dim / 2, "exp": float(dim)}[kind]


def natural_alpha(log_evidence: Tensor, class_logits: Tensor) -> Tensor:
    """Dirichlet parameters `1 + n chi` `[B, K]` from `log n` `[B]` and class logits `[B, K]`."""
    log_evidence = clamp_keeping_gradient(log_evidence, -LIMIT, LIMIT)
    return 1 + (log_evidence.unsqueeze(-1) + class_logits.log_softmax(-1)).exp()


class NatPNHead(nn.Module):
    """Features → `class_logits` `[B, K]`, `log_density` `[B]`, and `flow_density` `[B]`: the same, latent detached."""

    def __init__(self, dim: int, latent_dim: int, layers: int, num_classes: int):
        super().__init__()
        self.latent = nn.Linear(dim, latent_dim)
        self.classifier = nn.Linear(latent_dim, num_classes)
        self.flow = RadialFlows(latent_dim, layers)

    def forward(self, features: Tensor, logits: Tensor | None = None) -> dict[str, Tensor]:
        latent = self.latent(features)
        density = self.flow.log_prob(latent).squeeze(-1)
        still = self.flow.log_prob(latent.detach()).squeeze(-1) if self.training else density
        return {"class_logits": self.classifier(latent), "log_density": density, "flow_density": still}

    def fit_flow(self, features: Tensor, steps: int) -> None:
        """Train the flow alone to maximise the mean log-density of features `[N, D]`."""
        with torch.no_grad():
            device = self.latent.weight.device
            latent = torch.cat([self.latent(rows.to(device)) for rows in features.split(_FIT_ROWS)])
        parameters = list(self.flow.parameters())
        optimizer = torch.optim.Adam(parameters, lr=_FIT_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
        with torch.enable_grad():
            for _ in range(steps):
                rows = torch.randint(len(latent), (min(_FIT_ROWS, len(latent)),)).to(device)
                loss = -self.flow.log_prob(latent[rows]).mean()
                for parameter, slope in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    parameter.grad = slope
                optimizer.step()
                schedule.step()
        for parameter in parameters:
            parameter.grad = None


@dataclass(frozen=True, kw_only=True)
class NatPN(Method):
    """
    Natural posterior network.

    Args:
        latent_dim (`int`, *optional*, defaults to 16):
            Dimension L of the latent space.
        layers (`int`, *optional*, defaults to 8):
            Radial layers of the flow.
        entropy_weight (`float`, *optional*, defaults to 1e-5):
            Weight of the entropy bonus.
        budget (`str`, *optional*, defaults to `"normal"`):
            Added to the log-density: `"normal"` (`L log(4 pi) / 2`), `"constant"` (0), `"exp_half"` (`L/2`) or `"exp"`
            (`L`).
        flow_warmup_epochs (`float`, *optional*, defaults to 3):
            Epochs at the start in which only the flow is trained; at most a tenth of the run.
        flow_finetune_steps (`int`, *optional*, defaults to 2000):
            Steps, with batches of at most 1024 rows, that fit the flow to the final features; 0 for none.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"features", "fit_after"})
    schema: ClassVar[Any] = NatPNOptions
    latent_dim: int = 16
    layers: int = 8
    entropy_weight: float = 1e-5
    budget: str = "normal"
    flow_warmup_epochs: float = 3
    flow_finetune_steps: int = 2000

    def num_outputs(self, num_classes: int) -> int:
        return 0

    def build_head(self, info: HeadInfo) -> nn.Module:
        return NatPNHead(info.features(), self.latent_dim, self.layers, info.num_classes)

    def flow_only(self, progress: Progress) -> bool:
        """Whether only the flow is trained now; never in evaluation, which uses `Progress.final`."""
        return progress.epoch < min(self.flow_warmup_epochs, progress.epochs / 10)

    def trained(self, head: nn.Module, progress: Progress) -> list[nn.Parameter] | None:
        assert isinstance(head, NatPNHead)
        return list(head.flow.parameters()) if self.flow_only(progress) else None

    def alpha(self, out: Outputs) -> Tensor:
        """Dirichlet parameters `[B, K]` in float64, as evidence reaches 1e13."""
        log_evidence = out.of_head("log_density").double() + log_budget(self.latent_dim, self.budget)
        return natural_alpha(log_evidence, out.of_head("class_logits").double())

    def loss(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        # Weight 0 instead of a missing term: DDP expects every parameter in the backward pass.
        joint = 0.0 if self.flow_only(progress) else 1.0
        terms = posterior_terms(self.alpha(out), labels, self.entropy_weight)
        dtype = out.of_head("log_density").dtype
        weighted = {name: (joint * term).to(dtype) for name, term in terms.items()}
        return {**weighted, "density": (joint - 1) * out.of_head("flow_density")}

    def predict(self, out: Outputs) -> Prediction:
        alpha = self.alpha(out)
        probs = (alpha / alpha.sum(-1, keepdim=True)).to(out.of_head("log_density").dtype)
        # No alpha: the epistemic score would be derived from it as K/alpha0, which has ties that the density lacks.
        return Prediction(probs, None, 1 - probs.amax(-1), -out.of_head("log_density"))

    def monitor(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        return {"log_density": out.of_head("log_density"), "log_alpha0": torch.log(self.alpha(out).sum(-1)).float()}

    def fit_head(self, head: nn.Module, features: Tensor, labels: Tensor) -> None:
        assert isinstance(head, NatPNHead)
        head.fit_flow(features, self.flow_finetune_steps)

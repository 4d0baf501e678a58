"""The gate at work: densities of pooled hidden states in torch, on the device where the model runs."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ..core import checkpoint
from ..decisions import gate as files
from ..decisions.density import NEIGHBOURS
from ..decisions.gate import Gate

if TYPE_CHECKING:
    from ..core.backend import Backend

logger = logging.getLogger(__name__)


class GateScorer(nn.Module):
    """
    Scores features with a fitted [`Gate`]; its tensors follow the features to their device.

    Args:
        gate (`Gate`):
            The fitted density.
    """

    def __init__(self, gate: Gate):
        super().__init__()
        self.gate = gate
        tensors = {name: torch.from_numpy(values.astype(np.float64)) for name, values in gate.tensors.items()}
        if gate.kind == "knn":
            self.rows = nn.Buffer(nn.functional.normalize(tensors["rows"], dim=-1).float(), persistent=False)
            self.neighbours = min(NEIGHBOURS, self.rows.shape[1])
        else:
            means = tensors["means"]
            self.origin = nn.Buffer(means.mean(1, keepdim=True).float(), persistent=False)  # [G, 1, D]
            self.components = nn.Buffer(tensors["components"].float(), persistent=False)
            self.scale = nn.Buffer(tensors["variances"].rsqrt().unsqueeze(1).float(), persistent=False)
            self.rest = nn.Buffer(tensors["rest"].rsqrt()[:, None, None].float(), persistent=False)
            self.means = nn.Buffer(self._whitened(means.float()), persistent=False)
        self.centre = nn.Buffer(torch.from_numpy(gate.centre).float(), persistent=False)
        self.spread = nn.Buffer(torch.from_numpy(gate.spread).float(), persistent=False)

    def _whitened(self, features: Tensor) -> Tensor:
        """Features `[G, N, D]` as vectors `[G, N, R + D]` whose Euclidean distances are Mahalanobis distances."""
        centred = features - self.origin
        inside = centred @ self.components
        outside = centred - inside @ self.components.mT  # what is left, not a difference of two large numbers
        return torch.cat([inside * self.scale, outside * self.rest], dim=-1)

    @torch.no_grad()
    def scores(self, features: Tensor) -> Tensor:
        """
        Scores of each group `[N, G]`, larger for more typical rows: minus half the squared Mahalanobis distance to the
        nearest class, or minus the cosine distance to the k-th nearest training row.

        Args:
            features (`Tensor`):
                `[N, G, D]`, as the backend pools them.
        """
        if features.device != self.centre.device:
            self.to(features.device)
        with torch.autocast(features.device.type, enabled=False):
            unit = nn.functional.normalize(features.float(), dim=-1).transpose(0, 1)
            if self.gate.kind == "knn":
                nearest = (unit @ self.rows.mT).topk(self.neighbours, dim=-1).values[..., -1] - 1
            elif self.means.shape[1] == 1:
                nearest = -(self._whitened(unit) - self.means).square().sum(-1) / 2
            else:
                mode = "donot_use_mm_for_euclid_dist"  # the other one loses digits
                distances = torch.cdist(self._whitened(unit), self.means, compute_mode=mode)
                nearest = -distances.amin(-1).square() / 2
        return nearest.transpose(0, 1)

    def forward(self, features: Tensor) -> Tensor:
        """The density `[N]` of rows: the mean of their groups' standardised scores."""
        scores = self.scores(features)
        return ((scores - self.centre) / self.spread).mean(-1)


def base_fingerprint(model: nn.Module) -> str | None:
    """
    A hash of a base model's one-dimensional parameters (norms, biases), which tell one base model from another.

    They are rounded to bfloat16, so that the same weights in another dtype are the same; `None` where parameters are
    split over processes.
    """
    digest = hashlib.sha256()
    for name, value in model.named_parameters():
        if hasattr(value, "ds_id") or hasattr(value, "to_local"):
            return None
        if value.dim() == 1 and value.is_floating_point() and "lora_" not in name:
            digest.update(value.detach().cpu().bfloat16().float().numpy().tobytes())
    return digest.hexdigest()


def load_gate(folder: str | Path, model: nn.Module, backend: Backend) -> GateScorer | None:
    """
    The gate of a checkpoint, for the model that was loaded from it.

    A damaged gate, or one of other weights, is a `UserError`. One of another base model or precision is not used, and
    a warning says so: densities are finer than answers, which need not be lost.

    Args:
        folder (`str` or `Path`):
            The checkpoint.
        model (`nn.Module`), backend (`Backend`):
            What was loaded.
    """
    folder = Path(folder)
    if not (folder / files.FILE).is_file():
        return None
    gate = Gate.load(folder, checkpoint.weights_hash(folder))
    precision = backend.config().get("precision")
    reason = gate.difference(backend.gate_groups(model), base_fingerprint(model), precision)
    if reason is not None:
        logger.warning(f"{folder / files.FILE} is not used: {reason}, so there is no familiarity; {files.CURE}")
        return None
    return GateScorer(gate)

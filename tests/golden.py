"""The example logits of the golden values, and the tolerances of their comparison."""

import torch

S = [2.0, 0.5, -1.0, 0.0]
MEMBERS = [S, [1.0, 1.5, -0.5, 0.2], [2.5, -0.5, 0.0, -1.0]]
PRECISIONS = [(torch.float64, 1e-6), (torch.float32, 1e-5)]


def logits(dtype=torch.float64, values=S):
    return torch.tensor([values], dtype=dtype)


def close(found, wanted, tolerance=1e-6):
    """Whether two values agree: absolute tolerance below 1, relative above."""
    return abs(float(torch.as_tensor(found).detach()) - wanted) <= tolerance * max(1.0, abs(wanted))

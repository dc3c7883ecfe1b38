"""Two update rules for two kinds of weight: Muon for the matrices, AdamW for everything else.

Muon (Jordan et al., 2024) moves a weight matrix along the nearest orthogonal matrix to its
momentum; a small transformer learns about twice as much from a token as with AdamW alone. The
nearest orthogonal matrix comes from five Newton-Schulz steps with the published coefficients.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPSILON = 1e-7


class Muon:
    """Momentum, made orthogonal, for matrices; those of one shape are updated as one batch."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], *, momentum: float = 0.95, decay: float = 0.0
    ) -> None:
        self.momentum = momentum
        self.decay = decay
        self._groups: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            self._groups.setdefault(matrix.shape, []).append(matrix)
        self._momenta = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self._groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move every matrix by `rate` times an orthogonal matrix, and forget its gradient."""
        for shape, group in self._groups.items():
            gradient = torch.stack([_gradient(matrix) for matrix in group])
            momentum = self._momenta[shape].lerp_(gradient, 1 - self.momentum)
            update = orthogonal(gradient.lerp_(momentum, self.momentum))
            scale = rate * max(1.0, shape[0] / shape[1]) ** 0.5
            for matrix, direction in zip(group, update.unbind(), strict=True):
                matrix.mul_(1 - rate * self.decay).sub_(direction, alpha=scale)
                matrix.grad = None


def orthogonal(matrices: Tensor) -> Tensor:
    """The orthogonal factor of each matrix of a batch `[batch, rows, columns]`, roughly."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + _EPSILON)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    found: Tensor = x.mT if is_tall else x
    return found.to(matrices.dtype)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "step() comes after backward()"
    return parameter.grad


class Optimiser:
    """Muon on the matrices of the layers, AdamW on the embedding and the norms."""

    def __init__(self, model: nn.Module, *, matrix_rate: float, other_rate: float) -> None:
        layered = {n: p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n}
        others = [p for n, p in model.named_parameters() if n not in layered]
        self._muon = Muon(layered.values(), decay=0.02)
        self._adamw = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._matrix_rate, self._other_rate = matrix_rate, other_rate

    def step(self, scale: float) -> None:
        """One update with both rates multiplied by `scale`; gradients are gone afterwards."""
        self._muon.step(self._matrix_rate * scale)
        for group in self._adamw.param_groups:
            group["lr"] = self._other_rate * scale
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

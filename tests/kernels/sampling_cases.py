"""Which tokens a draw may choose, found one row at a time in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.sampling.protocol import Filters


@dataclass
class Draws:
    """Arguments of draw(), [rows] but for logits [rows, vocabulary]."""

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    point: Tensor

    @classmethod
    def random(
        cls, rows: int, vocabulary: int, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Draws:
        """Rows of all filters, some filters, none; equal logits only by accident."""
        generator = torch.Generator().manual_seed(rows * vocabulary)

        def choose(*values: float) -> Tensor:
            return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]

        point = torch.rand(rows, generator=generator, dtype=torch.float64)
        point[:2] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)[:rows]
        return cls(
            (torch.randn(rows, vocabulary, generator=generator) * 3).to(device, dtype),
            choose(0.3, 1.0, 2.0).to(device),
            choose(0, 1, 5, 50, vocabulary + 1).int().to(device),
            choose(1.0, 0.0, 0.5, 0.9, 0.999).to(device),
            choose(0.0, 0.0, 0.01, 0.3, 1.0).to(device),
            point.to(device),
        )

    def rows(self, which: Tensor | slice) -> Draws:
        return Draws(*(values[which] for values in self.columns()))

    def columns(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def all(self) -> tuple[Tensor, Filters, Tensor]:
        """Every filter is looked at."""
        filters = Filters(self.temperature, self.top_k, self.top_p, self.min_p)
        return self.logits, filters, self.point

    def used(self) -> tuple[Tensor, Filters, Tensor]:
        """Filters that no row uses are not looked at."""
        logits, filters, point = self.all()
        used = filters._replace(
            uses_top_k=bool((self.top_k > 0).any()),
            uses_top_p=bool((self.top_p < 1).any()),
            uses_min_p=bool((self.min_p > 0).any()),
        )
        return logits, used, point


def check_draws(sampling: Any, draws: Draws, slack: float = 1e-6) -> None:
    """Every token of `sampling` (a module with the calls of reference.py) lies, within a share of
    `slack` of the probability, where the number points."""
    tokens = sampling.draw(*draws.used())
    assert tokens.dtype == torch.int64
    for row, token in enumerate(tokens.tolist()):
        logits, temperature, top_k, top_p, min_p, point = (v[row].cpu() for v in draws.columns())
        probabilities = []
        # A limit that a filter meets within rounding may be taken either way, each by itself.
        for more, less in product((-slack, slack), repeat=2):
            probabilities.append(
                _filtered(
                    logits.double() / temperature.double(),
                    int(top_k),
                    float(top_p) + more if top_p < 1 else 1.0,
                    float(min_p) * (1 - less),
                )
            )
        assert _fits(probabilities, token, float(point), slack), (row, token)


def _fits(probabilities: list[Tensor], token: int, point: float, slack: float) -> bool:
    for probability in probabilities:
        upper = float(probability[: token + 1].sum())
        lower = upper - float(probability[token])
        if probability[token] > 0 and lower - slack <= point <= upper + slack:
            return True
    return False


def _filtered(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities [vocabulary] of what the filters leave of one row."""
    order = scaled.argsort(descending=True, stable=True)
    if top_k > 0:
        order = order[:top_k]
    probability = scaled[order].softmax(0)
    before = probability.cumsum(0) - probability
    keep = probability >= min_p * probability[0]
    if top_p < 1:
        keep &= before < top_p
    keep[0] = True
    result = torch.zeros_like(scaled)
    result[order[keep]] = probability[keep] / probability[keep].sum()
    return result


def check_argmax(
    argmax: Callable[[Tensor], Tensor],
    rows: int,
    vocabulary: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """Of rows with several largest logits; some have nothing but -inf."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 3).to(dtype)
    for _ in range(3):
        at = torch.randint(vocabulary, (rows, 1), generator=generator)
        logits.scatter_(1, at, 20.0)
    logits[::7] = -torch.inf
    expected = [int((row == row.max()).nonzero()[0]) for row in logits.double()]
    assert argmax(logits.to(device)).tolist() == expected

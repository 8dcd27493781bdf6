"""Heads of convolved attention by torch's own grouped convolution, in float64, on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.convolved_heads.protocol import HeadTokens
from tests.kernels.norm_cases import draw

# tokens, heads, KV heads, numbers of a head, taps
SIZES = [
    (0, 4, 2, 16, 2),
    (1, 8, 2, 128, 2),
    (33, 4, 2, 16, 2),
    (70, 3, 1, 24, 2),
    (5, 6, 3, 8, 1),
    (40, 2, 2, 80, 2),
    (9, 4, 4, 16, 3),
]


class Case:
    """`tokens`, as a layer has them: parts of wider rows. `expected`: in float64."""

    def __init__(
        self, size: tuple[int, int, int, int, int], dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        count, heads, self.kv_heads, dim, taps = size
        torch.manual_seed(0)
        every, keys = heads + self.kv_heads, self.kv_heads * dim

        def drawn(*shape: int, scale: float = 1.0) -> Tensor:
            return draw(*shape, dtype=dtype, device=device, scale=scale)

        projected = drawn(count, every * dim + keys)
        convolved = drawn(count, every * dim + keys)
        newest, value = convolved.split([every * dim, keys], dim=1)
        older = [drawn(count, every * dim) for _ in range(taps - 1)]
        self.tokens = HeadTokens(projected, (*older, newest), value)
        weight = drawn(every * dim, dim, taps, scale=(taps * dim) ** -0.5)  # as checkpoints have it
        self.weight = weight.mT.flatten(1).unflatten(0, (every, dim)).contiguous()
        self.bias = drawn(every, dim).contiguous()

        inputs = torch.stack(self.tokens.taps, dim=2).double()
        bias = self.bias.flatten().double()
        y = F.conv1d(inputs, weight.double(), bias, groups=every)[:, :, 0].unflatten(1, (-1, dim))
        wide = projected.double().unflatten(1, (-1, dim))
        query, key = wide[:, :heads], wide[:, heads:every]
        means = (query + key.repeat_interleave(heads // self.kv_heads, dim=1)) / 2
        of_keys = means.unflatten(1, (self.kv_heads, -1)).mean(dim=2)
        value = value.double().unflatten(1, (-1, dim))
        self.expected = torch.cat((y[:, :heads] + means, y[:, heads:] + of_keys, value), dim=1)

    def check(self, kernels: Any) -> Tensor:
        """What `kernels` give, which must be what is expected."""
        found: Tensor = kernels.mix(self.tokens, self.weight, self.bias, self.kv_heads)
        assert found.dtype == self.bias.dtype
        rounding = {torch.bfloat16: 3e-2, torch.float16: 4e-3}.get(found.dtype, 1e-5)
        torch.testing.assert_close(found.double(), self.expected, atol=rounding, rtol=rounding)
        return found

    def rows(self, part: slice) -> HeadTokens:
        """Some of the tokens."""
        projected, taps, value = self.tokens
        return HeadTokens(projected[part], tuple(tap[part] for tap in taps), value[part])


def check_each_alone(kernels: Any, case: Case) -> None:
    """A token's bits are those that it has alone, or among some others."""
    every = case.check(kernels)
    for part in [slice(i, i + 1) for i in range(len(every))] + [slice(3, None), slice(0, -2)]:
        found = kernels.mix(case.rows(part), case.weight, case.bias, case.kv_heads)
        assert torch.equal(found, every[part])

"""Kimi delta attention, the gated delta rule with a decay for each key channel, in plain torch: the
contract of recurrences, transformers' functions, and channels that forget at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

from megatron_hybrid.kernels.gated_delta_rule import reference as delta_rule
from megatron_hybrid.kernels.protocols import DeltaRuleConstants, DeltaRuleTokens
from tests.kernels.recurrence_contract import *  # noqa: F403
from tests.kernels.recurrence_contract import Data, Recurrence, close, draw_columns
from tests.kernels.segments import Segment
from tests.thorough import usually

# (Of three such heads a product's bits depend on whether matrices begin at multiples of 32 bytes.)
HEADS, K_DIM, V_DIM = 4, 6, 5
SHAPE = (HEADS, V_DIM, K_DIM)
BOUNDS = {"softplus": None, "bounded": -5.0}


def draw(
    length: int,
    seed: int = 0,
    v_dim: int = V_DIM,
    k_dim: int = K_DIM,
    lower_bound: float | None = None,
) -> Data:
    """Keys are alike, which makes the systems of the chunked form harder; some channels hardly
    decay, others at once (of the last head by e^-50 a token and more)."""
    widths = [HEADS * k_dim, HEADS * k_dim, HEADS * v_dim, HEADS * k_dim, HEADS]
    q, k, v, a, b = draw_columns(length, widths, seed)
    k += 1
    b *= 2
    a *= 2
    by_channel = (HEADS, k_dim)
    g = torch.Generator().manual_seed(7)
    return Data(
        DeltaRuleTokens(
            q=q.unflatten(1, by_channel),
            k=k.unflatten(1, by_channel),
            v=v.unflatten(1, (HEADS, v_dim)),
            a=a.unflatten(1, by_channel),
            b=b,
        ),
        DeltaRuleConstants(
            A=-torch.tensor([0.001, 0.5, 4.0, 16.0]),
            dt_bias=2 * torch.randn(by_channel, generator=g),
            lower_bound=lower_bound,
        ),
    )


def log_decay(token: Any) -> Tensor:
    """[heads, k_dim] of one token, or [T, ...] of all."""
    moved, rate = token.a + token.dt_bias, token.A[:, None]
    if token.lower_bound is None:
        return rate * F.softplus(moved)
    return token.lower_bound * torch.sigmoid(-rate * moved)


def step(state: Tensor, token: Any) -> tuple[Tensor, Tensor]:
    q, k = (
        values / (values.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        for values in (token.q, token.k)
    )
    state = torch.exp(log_decay(token))[:, None] * state
    error = token.v - torch.einsum("hvk,hk->hv", state, k)
    state = state + torch.einsum("h,hv,hk->hvk", torch.sigmoid(token.b), error, k)
    return torch.einsum("hvk,hk->hv", state, q) / token.q.shape[-1] ** 0.5, state


def recurrence_of(bound: float | None) -> Recurrence:
    return Recurrence(delta_rule, SHAPE, partial(draw, lower_bound=bound), step)


# The gates differ in nothing else: the tests below, and Triton's, have both in CI, too.
@pytest.fixture(scope="module", params=usually(["softplus"], list(BOUNDS)))
def recurrence(request: pytest.FixtureRequest) -> Recurrence:
    return recurrence_of(BOUNDS[request.param])


@pytest.mark.parametrize("bound", BOUNDS.values())
@pytest.mark.parametrize("name", ["chunk", "recurrent"])
def test_it_equals_transformers(name: str, bound: float | None) -> None:
    """Whose states are [k_dim, v_dim]."""
    recurrence = recurrence_of(bound)
    data, state = recurrence.draw(70), recurrence.poisoned(3)
    state[1] = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    before = state[1].clone()
    y = recurrence.prefill(data, [Segment(5, 70, 1, 2)], state)
    tokens, constants = data.arguments()
    decay = log_decay(type("Given", (), {**tokens._asdict(), **constants._asdict()}))
    expected, last = getattr(kimi_linear, f"{name}_kimi_delta_attention")(
        *(x[None] for x in (tokens.q, tokens.k, tokens.v, decay, tokens.b.sigmoid())),
        initial_state=before.transpose(1, 2)[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    close(y, expected[0])
    close(state[2], last[0].transpose(1, 2))


def test_one_decay_for_all_channels_is_the_gated_delta_rule() -> None:
    recurrence = recurrence_of(None)
    data, state, other = recurrence.draw(70), recurrence.poisoned(3), recurrence.poisoned(3)
    a, bias = data.tokens.a[..., :1], data.constants.dt_bias[:, :1]
    alike = Data(
        data.tokens._replace(a=a.expand(-1, -1, K_DIM)),
        data.constants._replace(dt_bias=bias.expand(-1, K_DIM)),
    )
    one = Data(data.tokens._replace(a=a[..., 0]), data.constants._replace(dt_bias=bias[:, 0]))
    segments = [Segment(0, 70, 0, 1, [(32, 2)])]
    close(recurrence.prefill(alike, segments, state), recurrence.prefill(one, segments, other))
    close(state[1:], other[1:])

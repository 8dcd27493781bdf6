"""The gated delta rule in plain torch: the contract of recurrences, transformers' functions, and
keys that are equal or zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from megatron_hybrid.kernels.gated_delta_rule import reference as delta_rule
from megatron_hybrid.kernels.protocols import DeltaRuleConstants, DeltaRuleTokens
from tests.kernels.recurrence_contract import *  # noqa: F403
from tests.kernels.recurrence_contract import Data, Recurrence, close, draw_columns
from tests.kernels.segments import Segment

K_HEADS, HEADS, K_DIM, V_DIM = 2, 4, 6, 5
SHAPE = (HEADS, V_DIM, K_DIM)
BETA = 2.0  # the engine's tests have models with 1 and with 2


def draw(length: int, seed: int = 0, v_dim: int = V_DIM, k_dim: int = K_DIM) -> Data:
    """Keys are alike, which makes the systems of the chunked form harder; head 0 hardly decays, the
    last one at once."""
    widths = [K_HEADS * k_dim, K_HEADS * k_dim, HEADS * v_dim, HEADS, HEADS]
    q, k, v, a, b = draw_columns(length, widths, seed)
    k += 1
    b *= 2
    return Data(
        DeltaRuleTokens(
            q=q.unflatten(1, (K_HEADS, k_dim)),
            k=k.unflatten(1, (K_HEADS, k_dim)),
            v=v.unflatten(1, (HEADS, v_dim)),
            a=a,
            b=b,
        ),
        DeltaRuleConstants(
            A=-torch.tensor([0.001, 0.3, 2.0, 16.0]),
            dt_bias=torch.tensor([-1.0, 0.5, -2.0, 3.0]),
            beta_scale=BETA,
        ),
    )


def step(state: Tensor, token: Any) -> tuple[Tensor, Tensor]:
    q, k = (
        (values / (values.square().sum(-1, keepdim=True) + 1e-6).sqrt())
        .repeat_interleave(HEADS // K_HEADS, 0)
        for values in (token.q, token.k)
    )  # fmt: skip
    state = torch.exp(token.A * F.softplus(token.a + token.dt_bias))[:, None, None] * state
    error = token.v - torch.einsum("hvk,hk->hv", state, k)
    beta = token.beta_scale * torch.sigmoid(token.b)
    state = state + torch.einsum("h,hv,hk->hvk", beta, error, k)
    return torch.einsum("hvk,hk->hv", state, q) / token.q.shape[-1] ** 0.5, state


@pytest.fixture(scope="module")
def recurrence() -> Recurrence:
    return Recurrence(delta_rule, SHAPE, draw, step)


@pytest.mark.parametrize("name", ["chunk", "recurrent"])
def test_it_equals_transformers(recurrence: Recurrence, name: str) -> None:
    """Whose states are [k_dim, v_dim]."""
    data, state = draw(70), recurrence.poisoned(3)
    state[1] = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    before = state[1].clone()
    y = recurrence.prefill(data, [Segment(5, 70, 1, 2)], state)
    q, k, v, a, b = data.tokens
    decay = data.constants.A * F.softplus(a + data.constants.dt_bias)
    expected, last = getattr(qwen3_next, f"torch_{name}_gated_delta_rule")(
        *(values[None] for values in (q, k, v, decay, BETA * b.sigmoid())),
        initial_state=before.transpose(1, 2)[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    close(y, expected[0])
    close(state[2], last[0].transpose(1, 2))


def test_equal_keys_without_decay_equal_the_token_loop(recurrence: Recurrence) -> None:
    """Each token replaces what the one before it has stored."""
    data, state = draw(100), recurrence.poisoned(2)
    data.constants = data.constants._replace(beta_scale=1.0)
    data.tokens.k[:] = data.tokens.k[0].clone()
    data.tokens.b[:] = 9
    data.constants.A[:] = 0
    y = recurrence.prefill(data, [Segment(0, 100, 0, 1)], state, chunk=64)
    expected, states = recurrence.token_loop(data)
    close(y, expected)
    close(state[1], states[100])


def test_keys_of_zeros_add_nothing(recurrence: Recurrence) -> None:
    data, state = draw(20), recurrence.poisoned(2)
    data.tokens.k[:] = 0
    data.tokens.q[:10] = 0
    assert recurrence.prefill(data, [Segment(0, 20, 0, 1)], state).eq(0).all()
    assert state[1].eq(0).all()

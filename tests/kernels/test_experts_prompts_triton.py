"""The grouped products of experts for prompts, in Triton's interpreter: in float32, since it has no
products of bfloat16."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs these kernels compiled", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from megatron_hybrid.kernels.experts import triton_prompts as prompts  # noqa: E402
from megatron_hybrid.kernels.experts.sums import PairParts  # noqa: E402
from tests.kernels.experts_by_hand import Mixture, by_hand, mixture, shared_out  # noqa: E402
from tests.thorough import A_THIRD, usually  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned")


def mix(m: Mixture, elsewhere: int = 0) -> torch.Tensor:
    parts = prompts.expert_parts(*m.arguments(elsewhere))
    return PairParts(parts, m.experts, m.up_proj.shape[0] if elsewhere else 0).sum()


def check(m: Mixture) -> None:
    torch.testing.assert_close(mix(m).double(), by_hand(m), atol=1e-5, rtol=1e-5)


@A_THIRD
@pytest.mark.parametrize(
    ("activation", "gated"),
    [("silu_to_0.25", True), ("relu2", False), ("silu", False)],
)
@pytest.mark.parametrize("tokens", [1, 70, 300])
def test_mix(tokens: int, activation: str, gated: bool) -> None:
    """Experts with few rows and with several blocks; some with none."""
    check(mixture(tokens, chosen=3, activation=activation, gated=gated))


@pytest.mark.parametrize(("width", "inner"), [(64, 256), (136, 72), (264, 136)])
def test_sizes_that_tiles_divide_and_others(width: int, inner: int) -> None:
    check(mixture(150, width=width, inner=inner))


@pytest.mark.parametrize("expert", usually([4], [0, 2, 4]))
def test_one_expert_has_all(expert: int) -> None:
    """Fewer pairs than are sorted by counting, and more."""
    for tokens in (200, 2100):
        m = mixture(tokens, num_experts=5, chosen=2)
        m.experts.fill_(expert)
        check(m)


@pytest.mark.parametrize("tokens", [90, 1500])
def test_ranks_with_some_of_the_experts_add_up_to_all(tokens: int) -> None:
    m = mixture(tokens, chosen=3)
    total = sum(mix(part, 6) for part in shared_out(m, usually(2, 4)))
    torch.testing.assert_close(total.double(), by_hand(m), atol=1e-5, rtol=1e-5)


def test_what_they_are_for() -> None:
    x, experts, _, layer = mixture(800, num_experts=4, chosen=1).arguments()
    half = x.half()
    layer = layer._replace(up=layer.up.half(), down=layer.down.half())
    assert prompts.can_mix(half, layer, experts.numel())
    assert not prompts.can_mix(x, layer, experts.numel())
    assert not prompts.can_mix(half, layer, 300)
    assert not prompts.can_mix(half, layer._replace(elsewhere=8), experts.numel())
    odd = layer._replace(up=layer.up[:, :, :-1])
    assert not prompts.can_mix(half, odd, experts.numel())

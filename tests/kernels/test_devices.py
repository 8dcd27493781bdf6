"""What launches ask of their inputs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_hybrid.kernels.protocols import Mamba2Tokens

pytest.importorskip("triton")

from megatron_hybrid.kernels.devices import checked_output, stages_that_fit  # noqa: E402


def tokens_of(x: torch.Tensor) -> Mamba2Tokens:
    count = len(x)
    return Mamba2Tokens(x, *(torch.zeros(count, 2, 4) for _ in range(2)), torch.zeros(count, 3))


VIEWS = {
    "contiguous": lambda: torch.zeros(5, 3, 4),
    "of wider rows": lambda: torch.zeros(5, 20)[:, 3:15].unflatten(1, (3, 4)),
    "one row": lambda: torch.zeros(5, 3, 4)[::5],
    "dimensions of one": lambda: torch.zeros(5, 4, 1).transpose(1, 2),
    "every other column": lambda: torch.zeros(5, 3, 8)[:, :, ::2],
    "transposed": lambda: torch.zeros(5, 4, 3).transpose(1, 2),
    "of wider heads": lambda: torch.zeros(5, 3, 8)[:, :, :4],
    "no columns": lambda: torch.zeros(5, 4, 0).transpose(1, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_only_the_first_dimension_may_be_strided(name: str) -> None:
    x, state = VIEWS[name](), torch.zeros(2, 3, 4)
    if x[:1].is_contiguous():
        assert checked_output(tokens_of(x), state, None).shape == x.shape
        assert checked_output(tokens_of(torch.zeros(x.shape)), state, x) is x
        return
    for tokens, out in ((tokens_of(x), None), (tokens_of(torch.zeros(x.shape)), x)):
        with pytest.raises(ValueError, match="all but the first dimension"):
            checked_output(tokens, state, out)


@pytest.mark.parametrize(
    ("shared", "expected"), [(232_448, 8), (166_912, 8), (101_376, 4), (16_384, 1)]
)
def test_a_loop_has_as_many_steps_under_way_as_fit(
    shared: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": shared})
    driver = SimpleNamespace(active=SimpleNamespace(utils=utils))
    monkeypatch.setattr("triton.runtime.driver", driver)
    stages_that_fit.cache_clear()
    assert stages_that_fit(8, 20_480, torch.device("cuda", 0)) == expected
    stages_that_fit.cache_clear()
    assert stages_that_fit(8, 20_480, torch.device("cpu")) == 8

"""The Mamba2 mixer: projection, short convolution, selective scan, gated norm, projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.contract import RecurrentState
from megatron_hybrid.layers.inputs import StateSpec
from megatron_hybrid.layers.norm import GatedRMSNorm
from megatron_hybrid.layers.parts import Parts, WeightPart, section, shard, whole
from megatron_hybrid.layers.step import Step
from megatron_hybrid.parallel import ColumnParallelLinear, ParallelContext, RowParallelLinear


@dataclass(frozen=True)
class Mamba2Config:
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int
    kernel_chunk: int
    conv_bias: bool = True
    proj_bias: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim


class Mamba2(nn.Module):
    """Heads are split over the ranks; groups too, or replicated where there are fewer than ranks.

    A rank's rows of the input projection, and its channels of the convolution:

        | z | x | B | C | dt |          | x | B | C |
    """

    def __init__(
        self,
        config: Mamba2Config,
        hidden_size: int,
        eps: float,
        layer: int,
        dtype: torch.dtype,
        parallel: ParallelContext,
        conv_states_dtype: torch.dtype,
        ssm_states_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        ranks = parallel.size
        if config.num_heads % ranks:
            raise ConfigurationError(
                f"--tensor-model-parallel-size {ranks} does not divide the model's "
                f"{config.num_heads} Mamba heads."
            )
        if config.num_groups % ranks and ranks % config.num_groups:
            raise ConfigurationError(
                f"--tensor-model-parallel-size {ranks} neither divides nor is a multiple of the "
                f"model's {config.num_groups} Mamba groups."
            )
        self.config = config
        self.layer = layer
        self.parallel = parallel
        self.heads = config.num_heads // ranks
        self.groups = max(config.num_groups // ranks, 1)
        self.first_group = parallel.rank * config.num_groups // ranks
        self.inner = self.heads * config.head_dim
        self.conv_sections = [self.inner] + [self.groups * config.state_size] * 2  # x, B, C
        channels = sum(self.conv_sections)
        self.in_sections = [self.inner, channels, self.heads]  # z, convolved, dt
        self.in_proj = ColumnParallelLinear(
            hidden_size,
            sum(self.in_sections) * ranks,
            bias=config.proj_bias,
            dtype=dtype,
            parallel=parallel,
        )
        self.out_proj = RowParallelLinear(
            config.inner_size, hidden_size, bias=config.proj_bias, dtype=dtype, parallel=parallel
        )
        self.conv_weight = _parameter((channels, config.conv_width), dtype)
        self.conv_bias = _parameter((channels,), dtype) if config.conv_bias else None
        self.dt_bias = _parameter((self.heads,), torch.float32)
        self.A_log = _parameter((self.heads,), torch.float32)
        self.D = _parameter((self.heads,), torch.float32)
        self.A: Tensor  # [heads] float32, negative; see after_loading
        self.norm = GatedRMSNorm(config.inner_size, config.num_groups, eps, dtype, parallel)
        self.spec = StateSpec(
            conv_shape=(channels, config.conv_width - 1),
            conv_dtype=conv_states_dtype,
            ssm_shape=(self.heads, config.head_dim, config.state_size),
            ssm_dtype=ssm_states_dtype,
            kernel_chunk=config.kernel_chunk,
        )

    def state_spec(self) -> StateSpec:
        return self.spec

    def weight_parts(self) -> Parts:
        rank, config = self.parallel.rank, self.config
        for kind, parameter in (("weight", self.in_proj.weight), ("bias", self.in_proj.bias)):
            if parameter is not None:
                z, convolved, dt = parameter.split(self.in_sections)
                conv_total = config.inner_size + 2 * config.num_groups * config.state_size
                total = config.inner_size + conv_total + config.num_heads
                yield section(f"in_proj.{kind}", z, 0, rank * self.inner, total)
                yield from self._convolved(f"in_proj.{kind}", convolved, config.inner_size, total)
                dt_start = config.inner_size + conv_total + rank * self.heads
                yield section(f"in_proj.{kind}", dt, 0, dt_start, total)
        conv_total = config.inner_size + 2 * config.num_groups * config.state_size
        yield from self._convolved("conv1d.weight", self.conv_weight[:, None], 0, conv_total)
        if self.conv_bias is not None:
            yield from self._convolved("conv1d.bias", self.conv_bias, 0, conv_total)
        for name in ("dt_bias", "A_log", "D"):
            yield shard(name, getattr(self, name), 0, rank, config.num_heads)
        for part in self.norm.weight_parts():
            yield WeightPart(f"norm.{part.role}", part.shape, part.source, part.target)
        yield shard("out_proj.weight", self.out_proj.weight, 1, rank, config.inner_size)
        if self.out_proj.bias is not None:
            yield whole("out_proj.bias", self.out_proj.bias)

    def _convolved(self, role: str, target: Tensor, start: int, total: int) -> Parts:
        """x, B and C: three sections of the checkpoint's rows from `start` on."""
        x, b, c = target.split(self.conv_sections)
        per_group = self.config.state_size
        all_groups = self.config.num_groups * per_group
        group = self.first_group * per_group
        after_x = start + self.config.inner_size
        yield section(role, x, 0, start + self.parallel.rank * self.inner, total)
        yield section(role, b, 0, after_x + group, total)
        yield section(role, c, 0, after_x + all_groups + group, total)

    def after_loading(self) -> None:
        """What is made from the weights once."""
        self.A = -self.A_log.exp()
        if self.conv_weight.is_cuda:  # channels side by side, as in the activations
            self.conv_weight.data = self.conv_weight.t().contiguous().t()

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the sequences' states."""
        state = step.caches.state[self.layer]
        gate, convolved, dt = self.in_proj(x).split(self.in_sections, dim=1)
        n = step.num_decodes
        if step.scan is None:
            y = self._decode(convolved, dt, state, step)
        elif n == 0:
            y = self._prefill(convolved, dt, state, step)
        else:
            y = x.new_empty((x.shape[0], self.heads, self.config.head_dim))
            self._decode(convolved[:n], dt[:n], state, step, y[:n])
            self._prefill(convolved[n:], dt[n:], state, step, y[n:])
        y = y.view(-1, self.inner)
        return self.out_proj(self.norm(y, gate, step.kernels))

    def _prefill(
        self,
        convolved: Tensor,
        dt: Tensor,
        state: RecurrentState,
        step: Step,
        out: Tensor | None = None,
    ) -> Tensor:
        xbc = step.kernels.conv.prefill(
            convolved, self.conv_weight, self.conv_bias, state.conv, step.conv
        )
        return step.kernels.scan.prefill(
            *self._heads(xbc), dt, self.A, self.D, self.dt_bias, self.config.dt_limit,
            state.ssm, step.scan, out,
        )  # fmt: skip

    def _decode(
        self,
        convolved: Tensor,
        dt: Tensor,
        state: RecurrentState,
        step: Step,
        out: Tensor | None = None,
    ) -> Tensor:
        xbc = step.kernels.conv.decode(
            convolved, self.conv_weight, self.conv_bias, state.conv, step.decode
        )
        return step.kernels.scan.decode(
            *self._heads(xbc), dt, self.A, self.D, self.dt_bias, self.config.dt_limit,
            state.ssm, step.decode, out,
        )  # fmt: skip

    def _heads(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, channels] -> x [tokens, heads, head_dim], B and C [tokens, groups, state]."""
        x, b, c = xbc.split(self.conv_sections, dim=1)
        tokens, size = xbc.shape[0], self.config.state_size
        return (
            x.view(tokens, self.heads, self.config.head_dim),
            b.view(tokens, self.groups, size),
            c.view(tokens, self.groups, size),
        )


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

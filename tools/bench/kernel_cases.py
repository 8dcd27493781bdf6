"""What tools/benchmark_kernels.py times, in this order: every kernel at the sizes of one model."""

from __future__ import annotations

from collections.abc import Iterator

from bench.attention_cases import attention_cases
from bench.cases import Bench, Case
from bench.conv_cases import conv_cases
from bench.convolved_cases import convolved_cases
from bench.expert_cases import expert_cases
from bench.few_row_cases import few_row_cases
from bench.indexed_cases import indexed_cases
from bench.latent_cases import latent_cases
from bench.layer_cases import layer_cases
from bench.norm_cases import activation_cases, gated_norm_cases, norm_cases
from bench.normed_router_cases import normed_router_cases
from bench.one_row_byte_cases import one_row_byte_cases
from bench.projected_cases import projected_cases
from bench.quantized_cases import quantized_expert_cases, quantized_linear_cases
from bench.recurrent_cases import recurrent_cases
from bench.recurrent_kinds import recurrent_kinds
from bench.relative_cases import relative_cases
from bench.sampling_cases import sampling_cases
from bench.streams_cases import streams_cases


def kernel_cases(bench: Bench) -> Iterator[Case]:
    for kind in recurrent_kinds(bench.model, bench.kernels, bench.device, bench.dtype):
        yield from recurrent_cases(bench, kind)
        if kind.channels:
            yield from conv_cases(bench, kind)
            yield from layer_cases(bench, kind)
    yield from projected_cases(bench)
    yield from gated_norm_cases(bench)
    yield from attention_cases(bench)
    yield from latent_cases(bench)
    yield from indexed_cases(bench)
    yield from relative_cases(bench)
    yield from convolved_cases(bench)
    yield from norm_cases(bench)
    yield from activation_cases(bench)
    yield from streams_cases(bench)
    yield from expert_cases(bench)
    yield from quantized_expert_cases(bench)
    yield from normed_router_cases(bench)
    yield from quantized_linear_cases(bench)
    yield from few_row_cases(bench)
    yield from one_row_byte_cases(bench)
    yield from sampling_cases(bench)

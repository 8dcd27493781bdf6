"""What humming-kernels is given: the same weights, every pair once. Its kernels need a GPU."""

import pytest
import torch

from bench.humming_products import blocks, weight_tensors
from bench.quantized_cases import FORMATS
from megatron_hybrid.kernels.linear.formats import FP4_NUMBERS

NUMBERS = torch.tensor([*FP4_NUMBERS, *(-x for x in FP4_NUMBERS)])


@pytest.mark.parametrize("experts", [0, 3])
def test_humming_gets_the_same_weight(experts):
    torch.manual_seed(0)
    weight = FORMATS["NVFP4"].quantize(torch.randn(max(experts, 1) * 8, 64))
    weight = weight.stacked(experts) if experts else weight
    given = weight_tensors(weight)
    assert given["weight"].dtype == torch.int32 and given["weight"].is_contiguous()
    assert given["weight_scale_2"].shape == (max(experts, 1),)
    codes = torch.stack([given["weight"] >> 4 * i & 15 for i in range(8)], -1).flatten(-2)
    whole = given["weight_scale_2"].view(-1, 1, 1) if experts else given["weight_scale_2"]
    scale = given["weight_scale"].float().repeat_interleave(16, -1)
    torch.testing.assert_close(NUMBERS[codes.long()] * scale * whole, weight.dequantize())


@pytest.mark.parametrize("size", [1, 4, 16])
def test_every_pair_lies_in_a_block_of_its_expert(size):
    torch.manual_seed(0)
    chosen = torch.rand(11, 6).topk(2).indices.int()
    chosen[chosen == 3] = 4  # an expert that nobody chose
    given = blocks(chosen, 6, size)
    expected, owners = [], []
    for expert in range(6):
        mine = [pair for pair, owner in enumerate(chosen.flatten().tolist()) if owner == expert]
        mine += [chosen.numel()] * (-len(mine) % size)
        expected += mine
        owners += [expert] * (len(mine) // size)
    assert given["sorted_ids"].tolist() == expected
    assert given["expert_ids"].tolist() == owners
    assert given["num_tokens_padded"].tolist() == [len(expected)]
    assert all(tensor.dtype == torch.int32 for tensor in given.values())

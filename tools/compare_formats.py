#!/usr/bin/env python
"""How much a model's answers change when its weights are rounded: by weight format, the mean KL
divergence of the next token's distribution from the one in float32, and the share of positions
whose likeliest token is another one.

    python tools/compare_formats.py --load HF_DIR
    python tools/compare_formats.py --random configs/models/nemotron-h-8b --layers 10

The arithmetic is transformers' in float32; weights, and inputs where a format rounds those, are
rounded as the engine does: all linear layers but the head, routers and what gates a recurrence.
`--random`: a folder with a config.json alone, whose weights are drawn as transformers does; on real
text a trained model is surer of its tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from megatron_hybrid.arguments import ArgumentParser
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.kernels.linear.formats import WeightFormat
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.weights import open_folder
from megatron_hybrid.verify.dequantized import weights_of
from megatron_hybrid.verify.oracle import Oracle
from megatron_hybrid.verify.rounding import Roundings

FORMATS = {
    "fp8": WeightFormat("float8_e4m3fn", activations="token"),
    "fp8_block": WeightFormat("float8_e4m3fn", 128, 128, activations="group"),
    "int8": WeightFormat("int8", activations="token"),
    "nvfp4": WeightFormat("float4_e2m1", 1, 16),
    "w4a16": WeightFormat("uint4", 1, 128),
}


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--load", type=Path, metavar="DIR", help="Hugging Face folder")
    model.add_argument("--random", type=Path, metavar="DIR", help="folder with a config.json")
    parser.add_argument("--layers", type=int, help="of a --random model; left out: all")
    parser.add_argument("--vocabulary", type=int, help="of a --random model; left out: all of it")
    parser.add_argument("--tokens", type=int, default=256, help="of a sequence (default: 256)")
    parser.add_argument("--sequences", type=int, default=2, help="random ones (default: 2)")
    parser.add_argument("--formats", default=",".join(FORMATS), metavar="NAME[,NAME...]")
    args = parser.parse_args()
    args.formats = args.formats.split(",")
    if unknown := [name for name in args.formats if name not in FORMATS]:
        parser.error(f"--formats: {unknown[0]} is none of {', '.join(FORMATS)}.")
    return args


def write_random(source: Path, target: Path, layers: int | None, vocabulary: int | None) -> None:
    """A folder with the model that `source` describes, in bfloat16, perhaps a part of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((source / "config.json").read_text())
    if layers is not None:
        config["num_hidden_layers"] = layers
        for name in ("hybrid_override_pattern", "layer_types", "layers_block_type"):
            if name in config:
                config[name] = config[name][:layers]
    config["vocab_size"] = vocabulary or config["vocab_size"]
    (target / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target))
    model.to(torch.bfloat16).save_pretrained(target)


def logprobs(path: Path, format: WeightFormat | None, sequences: list[tuple[int, ...]]) -> Tensor:
    """[positions, vocabulary] float32."""
    folder = ModelFolder.of(EngineConfig(load=str(path)))
    with open_folder(folder, folder.config) as source, Roundings(torch.float32, False, format) as r:
        weights = {name: r.noted(weight) for name, weight in weights_of(source).items()}
        oracle = Oracle(
            str(path), weights, device=torch.device("cpu"), dtype=torch.float32, by_layer=False
        )
        return torch.cat(list(oracle.logprobs(sequences)))


def main() -> int:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as made:
        path = args.load
        if path is None:
            path = Path(made)
            write_random(args.random, path, args.layers, args.vocabulary)
        vocabulary = ModelFolder.of(EngineConfig(load=str(path))).config.vocab_size
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randint(vocabulary, (args.sequences, args.tokens), generator=generator)
        sequences = [tuple(row) for row in drawn.tolist()]
        exact = logprobs(path, None, sequences)
        print("| format | KL, nats | other likeliest token |\n|---|---|---|")
        for name in args.formats:
            rounded = logprobs(path, FORMATS[name], sequences)
            divergence = (exact.exp() * (exact - rounded)).sum(-1).mean()
            changed = (exact.argmax(-1) != rounded.argmax(-1)).float().mean()
            print(f"| {name} | {divergence:.2g} | {changed:.1%} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

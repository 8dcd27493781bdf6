#!/usr/bin/env python
"""Converts a Hugging Face folder to a Megatron checkpoint (torch_dist) or back, bit for bit.

    python tools/convert_checkpoint.py --from HF_DIR --to DIR --format torch_dist
    python tools/convert_checkpoint.py --from DIR --to HF_DIR --format hf

Runs in one process, on a CPU, and holds one tensor in memory at a time (towards Hugging Face: one
file of --max-shard-size-gb). How many ranks wrote a Megatron checkpoint, and how many will read
one, makes no difference. docs/checkpoints.md says what is in the folders.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_hybrid import ConfigurationError, WeightsError
from megatron_hybrid.arguments import ArgumentParser


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--from", dest="source", required=True, type=Path, metavar="DIR", help="what to convert"
    )
    parser.add_argument(
        "--to", dest="target", required=True, type=Path, metavar="DIR", help="a new or empty folder"
    )
    parser.add_argument(
        "--format",
        required=True,
        choices=("torch_dist", "hf"),
        help="of --to: torch_dist (Megatron's) or hf (Hugging Face's)",
    )
    parser.add_argument(
        "--tokenizer-model",
        type=Path,
        metavar="DIR",
        help="folder with the tokenizer, where --from has none",
    )
    parser.add_argument(
        "--max-shard-size-gb",
        type=float,
        default=5.0,
        metavar="GB",
        help="size of a safetensors file (default: 5)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    from convert.conversion import (
        copy_tokenizer,
        to_hugging_face,
        to_megatron,
    )

    try:
        if args.format == "torch_dist":
            to_megatron(args.source, args.target, progress=not args.quiet)
        else:
            to_hugging_face(
                args.source,
                args.target,
                max_shard_bytes=int(args.max_shard_size_gb * 2**30),
                progress=not args.quiet,
            )
        if args.tokenizer_model is not None:
            copy_tokenizer(args.tokenizer_model, args.target)
    except (ConfigurationError, WeightsError) as error:
        print(f"convert_checkpoint.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

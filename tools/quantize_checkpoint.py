#!/usr/bin/env python
"""Writes a quantised Hugging Face folder that the engine, vLLM and transformers read.

    python tools/quantize_checkpoint.py --from HF_DIR --to DIR --scheme fp8
    python tools/quantize_checkpoint.py --from HF_DIR --to DIR --scheme w4a16 --group-size 128

As compressed-tensors stores it, rounded to the nearest, without calibration: `fp8` has a scale for
each row, and inputs are rounded for each token while it runs; `w4a16` has symmetric 4 bits in
groups. Experts are written one by one. docs/quantisation.md says what stays in 16 bits.
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
        "--from", dest="source", required=True, type=Path, metavar="DIR", help="what to quantise"
    )
    parser.add_argument(
        "--to", dest="target", required=True, type=Path, metavar="DIR", help="a new or empty folder"
    )
    parser.add_argument("--scheme", required=True, choices=("fp8", "w4a16"))
    parser.add_argument(
        "--group-size",
        type=int,
        default=128,
        metavar="COLUMNS",
        help="of w4a16: columns that share a scale; layers that it does not divide stay as they "
        "are (default: 128)",
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
    from convert.quantize import quantize_folder

    try:
        quantize_folder(
            args.source,
            args.target,
            args.scheme,
            group_size=args.group_size,
            max_shard_bytes=int(args.max_shard_size_gb * 2**30),
            progress=not args.quiet,
        )
    except (ConfigurationError, WeightsError) as error:
        print(f"quantize_checkpoint.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

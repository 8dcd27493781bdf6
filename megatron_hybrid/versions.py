"""`megatron-hybrid version`: ours, and those of the packages that answers and speed depend on."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from megatron_hybrid import __version__
from megatron_hybrid.arguments import ArgumentParser

PACKAGES = tuple(
    """torch triton megatron-core transformers tokenizers safetensors huggingface-hub llguidance
    numpy flask gunicorn gevent flashinfer-python mamba-ssm causal-conv1d
    transformer-engine""".split()
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the versions; 0. Nothing is imported for it, so it takes no seconds."""
    as_json = argument_parser().parse_args(argv).json
    machine = f"{platform.system()} {platform.machine()}"
    if as_json:
        about = {
            "megatron-hybrid": __version__,
            "python": platform.python_version(),
            "platform": machine,
            "packages": package_versions(),
        }
        print(json.dumps(about, indent=2))
        return 0
    lines = [f"megatron-hybrid {__version__}, Python {platform.python_version()}, {machine}"]
    packages = package_versions().items()
    lines += [f"  {name:<20}{found or 'not installed'}" for name, found in packages]
    print("\n".join(lines))  # at once: `| head` may close the pipe after some of them
    return 0


def argument_parser() -> ArgumentParser:
    """Of this command."""
    parser = ArgumentParser(
        prog="megatron-hybrid version", description="Our version, and those of what we stand on."
    )
    parser.add_argument("--json", action="store_true", help="as JSON; null: not installed")
    return parser


def package_versions() -> dict[str, str | None]:
    """By the names of packages; None for one that is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

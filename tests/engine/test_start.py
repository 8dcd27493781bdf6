"""What a start need not import, it does not: torch alone takes most of its seconds."""

from __future__ import annotations

import subprocess
import sys

START = """
import sys
from megatron_hybrid import LLM
LLM(device="cpu")
costly = {"megatron", "transformers", "triton", "scipy", "llguidance"} & sys.modules.keys()
assert not costly, costly
"""


def test_one_rank_starts_without_what_only_others_need() -> None:
    """megatron-core: with several ranks; transformers: with the first text; triton: on a GPU."""
    subprocess.run([sys.executable, "-c", START], check=True)

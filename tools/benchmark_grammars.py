#!/usr/bin/env python
r"""What the most expensive grammars cost a step: the CPU time of the longest mask, and of the token
that took longest, until the answer ends.

    python tools/benchmark_grammars.py
    python tools/benchmark_grammars.py --tokenizer FOLDER/tokenizer.json --seconds 60

Each line is JSON: the grammar, how many tokens came, the times in milliseconds, and why it ended.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from megatron_hybrid import reference_model
from megatron_hybrid.request import Grammar
from megatron_hybrid.text.grammar import GrammarCompiler

GRAMMARS = {
    "letters": r"start: /[a-z ]+/",
    "sums": r"start: e" + '\ne: e "a" e | "a" | e e e | ""',
    "pairs": r"start: e" + '\ne: e e | /[a-z ]/ | ""',
    "triples": r"start: e" + '\ne: e e e | /[a-z ]/ | e e | ""',
}


def main() -> None:
    """Measure each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokenizer", type=Path, default=reference_model.path() / "tokenizer.json")
    parser.add_argument("--tokens", type=int, default=400, help="of an answer, at most")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a grammar, at most")
    options = parser.parse_args()
    compiler = GrammarCompiler(options.tokenizer.read_text(encoding="utf-8"), 0)
    for name, text in GRAMMARS.items():
        found = measure(compiler, Grammar("lark", text, name), options.tokens, options.seconds)
        print(json.dumps({"grammar": name, **found}), flush=True)


def measure(
    compiler: GrammarCompiler, grammar: Grammar, tokens: int, seconds: float
) -> dict[str, object]:
    """Of an answer of one letter again and again."""
    answer = compiler.answer(compiler.matcher(grammar))
    (letter,) = compiler.token_ids("a")
    masks, taken = [0.0], [0.0]
    while len(taken) <= tokens and sum(masks) + sum(taken) < seconds and answer.error is None:
        start = time.process_time()
        answer.allowed()
        masked = time.process_time()
        masks.append(masked - start)
        if answer.error is None:
            answer.advance(letter)
            taken.append(time.process_time() - masked)
    return {
        "tokens": len(taken) - 1,
        "mask_ms": round(max(masks) * 1e3, 1),
        "token_ms": round(max(taken) * 1e3, 1),
        "error": answer.error,
    }


if __name__ == "__main__":
    main()

"""One rank of an engine in batch-invariant mode: saves the bits of answers.

torchrun --nproc-per-node N -m tests.parallel.batch_invariant_worker OUTPUT_FOLDER \\
    LIST_OF_OPTIONS MODEL_FOLDER...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engine.bits import REQUESTS, TOKENS, Known, bits_of, params
from tests.thorough import usually

WANTED = params(tokens=usually(4, 9))
LENGTHS = usually((17, 48), (1, 15, 17, 33, 48))


def bits(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Of answers alone and without a cache, and what differs from those."""
    known = Known.at(Path(folder), LENGTHS, **options)
    known.learn(known.prompts, WANTED)
    found: dict[str, Any] = {"alone": [known.alone(p, WANTED) for p in known.prompts]}
    llm = known.llm()
    for name in ("cold", "warm"):
        outputs = llm.generate(known.prompts, WANTED, progress=False)
        found[name] = list(known.differing(outputs, WANTED))
    found["cached"] = sum(output.cached_tokens for output in outputs)
    chunked = known.llm(**{TOKENS: 13, REQUESTS: 4})
    outputs = chunked.generate(known.prompts[::-1], WANTED, progress=False)
    found["in chunks"] = list(known.differing(outputs, WANTED))
    found["bits"] = [bits_of(output) for output in outputs[::-1]]
    return found


def main() -> None:
    output, options, *folders = sys.argv[1:]
    found = [
        {Path(folder).name: bits(folder, each) for folder in folders}
        for each in json.loads(options)
    ]
    written = json.dumps({"found": found})
    Path(output, f"rank{os.environ['RANK']}.json").write_text(written)


if __name__ == "__main__":
    main()

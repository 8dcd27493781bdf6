"""One rank of an engine that keeps which experts tokens had: saves them.

torchrun --nproc-per-node 2 -m tests.parallel.routed_worker OUTPUT_FOLDER SPLIT FOLDER

SPLIT: the flag of which 2 is given, tensor_model_parallel_size for instance.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from megatron_hybrid import LLM, SamplingParams
from tests.routers import OPTIONS

PROMPTS = [list(range(3 + i, 40 + 7 * i)) for i in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, return_routed_experts=True)


def main() -> None:
    output, split, folder = sys.argv[1:]
    llm = LLM(folder, enable_return_routed_experts=True, **OPTIONS, **{split: 2})
    found = [
        [output.prompt_token_ids + output.token_ids, output.routed_experts.tolist()]
        for _ in range(2)
        for output in llm.generate(PROMPTS, GREEDY, progress=False)
        if output.routed_experts is not None
    ]
    Path(output, f"rank{os.environ['RANK']}.json").write_text(json.dumps({"found": found}))


if __name__ == "__main__":
    main()

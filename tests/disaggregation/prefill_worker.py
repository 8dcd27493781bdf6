"""A server's engine that computes prompts, in a process that can be killed.

python -m tests.disaggregation.prefill_worker HOST:PORT FOLDER    ("" for the reference model)

It reads prompts as JSON, a line each, computes them, and says so; and hands them over meanwhile.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from queue import Empty, Queue

from megatron_hybrid import LLM, SamplingParams
from tests.disaggregation.engines import options

FIRST = SamplingParams(max_tokens=1, temperature=0.0)


def main() -> None:
    address, folder = sys.argv[1:]
    llm = LLM(**options(folder, role="prefill", disaggregation_listen=address))
    lines: Queue[str] = Queue()
    threading.Thread(target=lambda: [lines.put(line) for line in sys.stdin], daemon=True).start()
    print("ready", flush=True)
    while True:
        try:
            prompt = json.loads(lines.get_nowait())
        except Empty:
            if not llm.engine.use_idle_time():
                time.sleep(0.002)
            continue
        llm.generate([prompt], FIRST, progress=False)
        print("computed", flush=True)


if __name__ == "__main__":
    main()

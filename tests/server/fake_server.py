"""The server's two real processes around the fake engine: `python -m tests.server.fake_server`."""

from __future__ import annotations

import argparse
import logging
import sys

from tokenizers import Tokenizer

from megatron_hybrid.server.cli import stop_on_signals
from megatron_hybrid.server.engine_process import EngineLoop
from megatron_hybrid.server.launch import FrontEnd
from megatron_hybrid.server.options import ServerOptions
from tests.server.fake_engine import FakeEngine

FAILING_TEXT = "~"  # a prompt with this character makes the fake engine fail


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--http-threads", type=int, default=32)
    parser.add_argument("--fails-again", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    tokenizer = Tokenizer.from_file(f"{args.tokenizer}/tokenizer.json")
    engine = FakeEngine(
        tokenizer.get_vocab_size(),
        tuple(tokenizer.encode("<eos>").ids),
        step_seconds=args.step_seconds,
        fail_on=tokenizer.encode(FAILING_TEXT).ids[0],
        fails_again=args.fails_again,
    )
    options = ServerOptions(
        tokenizer_folder=args.tokenizer, model_name="fake", port=0, http_threads=args.http_threads
    )
    with FrontEnd(options) as front_end:
        front_end.wait_until_listening()
        loop = EngineLoop(engine, front_end.socket, front_end_failure=front_end.failure)
        stop_on_signals(loop)
        exit_code = loop.run()
        if exit_code != 0:
            front_end.abandon()
    return exit_code


if __name__ == "__main__":
    sys.exit(main())

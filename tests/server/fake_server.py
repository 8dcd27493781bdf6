"""The server's real processes around the fake engine: `python -m tests.server.fake_server`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.keys import ApiKey
from megatron_hybrid.server.link.messages import CacheSizes
from megatron_hybrid.server.loop.engine_loop import EngineLoop
from megatron_hybrid.server.loop.lifecycle import end_loading_on_signals, say_when_served, serve
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.server.processes import launch
from megatron_hybrid.server.processes.launch import FrontEnd
from tests.server.fake_engine import BLOCK_SIZE, FakeEngine

CACHE = CacheSizes(BLOCK_SIZE, BLOCK_SIZE)
FAILING_TEXT = "~"  # a prompt with this character makes the fake engine fail

IMPATIENT_FRONT_END = """
import sys
from megatron_hybrid.server.processes import front_end, worker

worker.STALLED_CLIENT_SECONDS = float(sys.argv[1])
worker.SPARE_CONNECTIONS = 8
front_end.main()
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--held-by", type=Path, help="no answer ends while there is this file")
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--max-seq-length", type=int, default=FakeEngine.max_seq_length)
    parser.add_argument("--http-workers", type=int, default=1)
    parser.add_argument("--http-connections", type=int, default=4096)
    parser.add_argument("--engine-restart-timeout", type=float, default=60.0)
    parser.add_argument("--shutdown-timeout", type=float, default=30.0)
    parser.add_argument("--fails-again", action="store_true")
    parser.add_argument("--never-fails", action="store_true", help="not even on FAILING_TEXT")
    parser.add_argument("--api-key")
    parser.add_argument("--ssl-certfile")
    parser.add_argument("--ssl-keyfile")
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--data-parallel-rank", type=int, default=0)
    parser.add_argument("--policy", default="longest_prefix")
    parser.add_argument("--stalled-client-seconds", help="not two minutes; and few places")
    parser.add_argument("--log-format", default="text")
    parser.add_argument("--otlp-traces-endpoint")
    parser.add_argument("--otlp-traces-protocol")
    parser.add_argument("--no-access-log", dest="access_log", action="store_false")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    if args.stalled_client_seconds is not None:
        launch.FRONT_END = ("-c", IMPATIENT_FRONT_END, args.stalled_client_seconds)
    tokenizer = Tokenizer.from_file(f"{args.tokenizer}/tokenizer.json")
    engine = FakeEngine(
        tokenizer.get_vocab_size(),
        tuple(tokenizer.encode("<eos>").ids),
        step_seconds=args.step_seconds,
        fail_on=None if args.never_fails else tokenizer.encode(FAILING_TEXT).ids[0],
        fails_again=args.fails_again,
        held_by=args.held_by,
    )
    engine.max_seq_length = args.max_seq_length
    options = ServerOptions(
        tokenizer_folder=args.tokenizer,
        model_name="fake",
        weight_folders=(".",),
        port=args.port,
        api_keys=() if args.api_key is None else (ApiKey(args.api_key, "alice"),),
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        http_workers=args.http_workers,
        http_connections=args.http_connections,
        log_format=args.log_format,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        otlp_traces_protocol=args.otlp_traces_protocol,
        access_log=args.access_log,
        engine_restart_timeout=args.engine_restart_timeout,
        shutdown_timeout=args.shutdown_timeout,
        data_parallel_size=args.data_parallel_size,
        inference_dynamic_batching_prefix_caching_coordinator_policy=args.policy,
    )
    try:
        with FrontEnd(options, args.data_parallel_rank) as front_end:
            end_loading_on_signals(front_end)
            front_end.wait_until_listening()
            time.sleep(args.load_seconds)
            loop = EngineLoop(
                engine,
                front_end.socket,
                front_end_failure=front_end.failure,
                on_join=say_when_served(options, front_end.replica),
                max_queue=options.max_queue,
                cache=CACHE,
            )
            return serve(loop, front_end, options)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

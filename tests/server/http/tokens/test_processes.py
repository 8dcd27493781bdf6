"""Tokens through the server's real processes: several workers, and a large body."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.server.http.tokens.asking import GENERATE, INFER, generate_body, infer_body, sampling
from tests.server.running import ServerProcess, wait_until
from tests.thorough import thorough

FAKE = ("-m", "tests.server.fake_server", "--tokenizer")
LENGTH = 20_000


def asked(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        content = answer.read()
    return json.loads(content) if answer.headers.get_content_type().endswith("json") else content


@thorough  # test_aborts.py, responses/test_processes.py
def test_a_rollout_of_several_workers_is_aborted_by_any_of_them(tokenizer_folder: Path) -> None:
    flags = ("--http-workers", "2", "--max-seq-length", str(2 * LENGTH), "--step-seconds", "0.01")
    with (
        ServerProcess(*FAKE, str(tokenizer_folder), *flags) as server,
        ThreadPoolExecutor(9) as pool,
    ):
        url = server.url
        # Larger than what a worker prepares itself.
        large = generate_body([5] * LENGTH, return_logprob=True)
        assert asked(url + GENERATE, large)["output_ids"] == [5, 5, 5]
        long = sampling(max_new_tokens=10_000)
        bodies = [generate_body([5 + i, 6], sampling_params=long, rid=f"r{i}") for i in range(4)]
        running = [pool.submit(asked, url + GENERATE, body) for body in bodies]
        running += [pool.submit(asked, url + INFER, infer_body(max_tokens=10_000)) for _ in "ab"]

        def busy() -> int:
            (load,) = asked(f"{url}/v1/loads?include=core")["loads"]
            return int(load["num_total_reqs"])

        wait_until(lambda: busy() == 6)
        assert asked(f"{url}/health_generate") == {"status": "ok"}
        assert asked(f"{url}/abort_request", {"rid": "r2"}) == {"aborted": 1}
        assert running[2].result(30)["meta_info"]["finish_reason"]["type"] == "abort"
        assert asked(f"{url}/abort_request", {"abort_all": True}) == {"aborted": 5}
        for answer in running[:4]:
            assert answer.result(30)["meta_info"]["finish_reason"]["type"] == "abort"
        for answer in running[4:]:
            (choice,) = answer.result(30)["choices"]
            assert choice["finish_reason"] == "abort" and choice["token_ids"]
        assert busy() == 0
        assert asked(f"{url}/flush_cache").startswith(b"Cache flushed.")
        assert asked(f"{url}/get_weight_version") == {"weight_version": "0"}
        assert asked(f"{url}/liveness") == {"status": "ok"}

#!/usr/bin/env python
"""Talks to the server with the official openai client (`pip install openai`).

python examples/openai_client.py                                 starts a server for itself
python examples/openai_client.py --url http://127.0.0.1:5000     asks one that is running
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

from openai import OpenAI

CODES = {
    "garage": 4821,
    "cellar": 9034,
    "library": 2275,
    "museum": 6618,
    "bakery": 1509,
    "harbour": 7342,
    "stadium": 3960,
    "castle": 8187,
    "theatre": 5471,
    "airport": 1946,
}


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """A server with the reference model on a free port, for as long as the block runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "megatron_hybrid.cli", "serve", "--port", str(port)]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if server.poll() is not None:
                raise SystemExit(f"The server ended with exit code {server.returncode}.")
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=30)


def talk(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="not needed unless the server has --api-key")
    model = client.models.list().data[0].id
    facts = " ".join(f"The code of the {place} is {code}." for place, code in CODES.items())

    print("streamed:  ", end="")
    stream = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": facts},
            {"role": "user", "content": "What is the code of the library?"},
        ],
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()

    for place in ("garage", "cellar"):
        answer = client.chat.completions.create(
            model=model,
            messages=[
                {"role": "system", "content": facts},
                {"role": "user", "content": f"What is the code of the {place}?"},
            ],
            temperature=0,
            max_tokens=32,
        )
        usage = answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        print(
            f"at once:   {answer.choices[0].message.content}   "
            f"({usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt tokens"
            " from the cache)"
        )

    # The server keeps the conversation: the next turn names the response that it goes on from.
    question = "What is the code of the museum?"
    first = client.responses.create(
        model=model, instructions=facts, input=question, temperature=0, max_output_tokens=32
    )
    second = client.responses.create(
        model=model,
        instructions=facts,
        input="And what is the code of the castle?",
        previous_response_id=first.id,
        temperature=0,
        max_output_tokens=32,
    )
    for response in (first, second):
        used = response.usage
        assert used is not None
        print(
            f"responses: {response.output_text}   ({used.input_tokens_details.cached_tokens} of "
            f"{used.input_tokens} input tokens from the cache)"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="a server that is running; left out: start one")
    args = parser.parse_args()
    with contextlib.nullcontext(args.url) if args.url else own_server() as url:
        talk(url.rstrip("/"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

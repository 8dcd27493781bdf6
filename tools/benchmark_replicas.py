#!/usr/bin/env python
r"""What two replicas of the reference model skip, against one with the memory of both.

    python tools/benchmark_replicas.py                          1,000 requests, every policy
    python tools/benchmark_replicas.py --requests 200 --policies longest_prefix
    python tools/benchmark_replicas.py --kill                   and one replica is killed midway,
                                                                with each policy
    python tools/benchmark_replicas.py --no-single          without the first two rows
    python tools/benchmark_replicas.py --policies --router http://localhost:5000 \
        --servers http://localhost:5001 http://localhost:5002   and another's router

The same chats (several turns, shared system messages; see --help for sizes) are held with one
replica that has all of the memory, with one that has its share, and then, for each policy, with
--replicas that have their share each. A row's last column is what they skip, divided by what the
first row skips (with --no-single the first policy's). The exit code is 1 if longest_prefix skips
less than --least percent of what one replica with all of the memory does, or if a request failed
that had to succeed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.replicas import (
    ALONE,
    JOINT,
    Memory,
    Workload,
    kill_midway,
    measure,
    measure_router,
)
from megatron_hybrid.arguments import ArgumentParser
from megatron_hybrid.server.options import POLICIES

POLICY_FLAG = "--inference-dynamic-batching-prefix-caching-coordinator-policy"


def main() -> int:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shown = Workload()
    for name, text in (
        ("requests", "in all"),
        ("turns", "requests of one chat"),
        ("systems", "different system messages; the k-th is 1/k as frequent as the first"),
        ("system_words", "words of a system message"),
        ("turn_words", "words of a user's message"),
        ("answer_tokens", "tokens of an answer"),
        ("clients", "requests at the same time"),
        ("open_chats", "chats that take turns"),
        ("seed", "of the texts"),
    ):
        flag = "--" + name.replace("_", "-")
        default = getattr(shown, name)
        parser.add_argument(flag, type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--kv-gb", type=float, default=0.1, help="of each replica")
    parser.add_argument("--states-gb", type=float, default=0.1, help="of each replica")
    parser.add_argument("--router", metavar="URL", help="of a router that runs: measure it, too")
    parser.add_argument("--servers", nargs="+", default=[], metavar="URL", help="behind --router")
    parser.add_argument("--no-single", action="store_true", help="leave out the single replicas")
    parser.add_argument("--kill", action="store_true", help="kill a replica midway, too")
    parser.add_argument("--least", type=float, default=90.0, help="percent, for longest_prefix")
    parser.add_argument("--json", type=Path, help="where the figures go, besides the terminal")
    parser.add_argument("flags", nargs="*", help="of the server, behind --")
    args = parser.parse_args()
    workload = Workload(**{name: getattr(args, name) for name in Workload.__slots__})
    memory = Memory(args.kv_gb, args.states_gb)
    flags = ["--inference-dynamic-batching-max-requests", "16", *args.flags]
    results: dict[str, Any] = {}
    if not args.no_single:
        for name, share in ((JOINT, args.replicas), (ALONE, 1)):
            results[name] = measure(1, [*flags, *memory.flags(share)], workload)
            _show(name, results)
    for policy in args.policies:
        mine = [*flags, *memory.flags(1), POLICY_FLAG, policy]
        results[policy] = measure(args.replicas, mine, workload)
        _show(policy, results)
    if args.router is not None:
        results["the router"] = measure_router(args.router, args.servers, workload)
        _show("the router", results)
    failed = any(one["failures"] for one in results.values())
    for policy in args.policies if args.kill else ():
        name = f"{policy}, killed"
        mine = [*flags, *memory.flags(1), POLICY_FLAG, policy]
        killed = results[name] = kill_midway(mine, workload)
        _show(name, results)
        lost = sum(killed["failures"].values())
        print(
            f"killed with {killed['open_before']['1']} of its requests open: {lost} failed "
            f"({killed['failures']}), {killed['answered_after']} were answered afterwards"
        )
        failed |= lost > killed["open_before"]["1"] + args.clients or not killed["answered_after"]
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    best, joint = results.get("longest_prefix"), results.get(JOINT)
    if best is not None and joint is not None and _share(best, joint) < args.least:
        print(f"longest_prefix skips less than {args.least:g} % of what one replica skips.")
        failed = True
    return int(failed)


def _share(result: dict[str, Any], first: dict[str, Any]) -> float:
    return 100 * result["skipped_tokens"] / max(1, first["skipped_tokens"])


def _show(name: str, results: dict[str, Any]) -> None:
    result, first = results[name], next(iter(results.values()))
    replicas = " + ".join(f"{one['requests_admitted']}" for one in result["by_replica"].values())
    print(
        f"{name:27} {result['requests']:5} requests ({replicas}) in {result['seconds']:6.1f} s, "
        f"TTFT {result['ttft_mean_ms']:6.0f} ms, p95 {result['ttft_p95_ms']:6.0f} ms, "
        f"skipped {result['skipped_tokens']:7} of {result['prompt_tokens']:7} tokens: "
        f"{_share(result, first):5.1f} %",
        flush=True,
    )
    for reason, count in result["failures"].items():
        print(f"    {count} x {reason}")


if __name__ == "__main__":
    sys.exit(main())

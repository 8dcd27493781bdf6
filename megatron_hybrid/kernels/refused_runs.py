"""What kernel sets say that have no `decode_runs`."""

from __future__ import annotations

from typing import Any, NoReturn

RUNS_ARE_REFUSED = (
    "--kernels libraries: mamba-ssm and causal-conv1d have no kernel for decodes of several tokens "
    "or with inputs that are kept; leave out --num-speculative-tokens, and "
    "--mamba-inference-state-write-interval is 1."
)


def refuse_runs(*_: Any) -> NoReturn:
    """In the place of a kernel set's plan_runs."""
    raise NotImplementedError(RUNS_ARE_REFUSED)

"""What Triton's kernels call: Triton's compiler refuses functions that are not its own, of which
its interpreter, in which a CPU's tests run, knows nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def test_kernels_call_functions_of_triton_alone() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.references_worker"],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said) > 200
    assert {name: error for name, error in said.items() if error} == {}

#!/usr/bin/env bash
# Makes the environment (once) and runs everything that CI runs: ruff, mypy, pytest.
#
#   tools/run_tests.sh                      all of it
#   tools/run_tests.sh tests/unit -k hash   only pytest, with these arguments
#
# TESTS=all: also what CI leaves out. tests/dynamo and tests/ray run in an environment of their own then.
# TEST_WORKERS: processes for pytest (default: one more than cores, at most 4, since tests of several
# processes mostly wait; 0 runs in this process). Each imports all tests, for 15 s of processor time.
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
case " ${TESTS:-} $*" in
" all "*tests/dynamo* | " all "*tests/ray*) ensure_deployments_environment ;;
*) ensure_environment test ;;
esac
export PATH="$VENV/bin:$PATH"

# The models in the tests are tiny: threads inside an operation only get in each other's way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MKL_NUM_THREADS="${MKL_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# Nothing here is compiled, and megatron-core makes every process that a test starts load the compiler.
export TORCHDYNAMO_DISABLE=1
# Half of what a process needs to import torch is compiling it: bytecode is kept, also where it must
# not lie among the sources.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$VENV/bytecode"
# So is what transformers reads 3,400 files for whenever it is imported.
export PYTHONPATH="$ROOT/tests/startup${PYTHONPATH:+:$PYTHONPATH}"
has_bytecode=$([ -e "$PYTHONPYCACHEPREFIX" ] && echo yes || true)

if [ $# -gt 0 ]; then
    exec python -m pytest "$@" </dev/null
fi

# Every check runs, so that one run shows all there is to mend. mypy runs beside the tests: these
# leave a part of the cores idle.
status=0
step() {
    echo "== $*"
    "$@" </dev/null || status=1
}
types=$(mktemp)
trap 'rm -f "$types"' EXIT
{ step mypy; exit "$status"; } >"$types" 2>&1 &
checking=$!
step ruff check .
step ruff format --check .
workers=${TEST_WORKERS:-$(python -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')}
# Each of pytest's processes would compile the same modules at the same time.
[ -n "$has_bytecode" ] || python -m pytest --collect-only -q </dev/null >/dev/null || true
# A file's tests stay in one process: they share servers and loaded models. Files begin in the order
# that tests/conftest.py gives them, not by how many tests they have.
step python -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder --durations 10
if [ "${TESTS:-}" = all ]; then
    step ensure_deployments_environment
    step "$VENV/bin/python" -m pytest tests/dynamo tests/ray
fi
wait "$checking" || status=1
cat "$types"
[ "$status" = 0 ] || echo "== at least one of the checks above failed" >&2
exit "$status"

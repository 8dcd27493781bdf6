#!/usr/bin/env bash
# Two GPUs of one machine, every layer split over both (tensor parallel): half of the weights and of
# the caches on each, and each token in little more than half of the time.
#
#     examples/launch/tensor_parallel.sh
#     examples/launch/tensor_parallel.sh --load DIR --load-format auto
#
# GPUS_PER_NODE   processes, one for each GPU; the product of the sizes in the file of options
# CONFIG          the file of options: model, sizes, budgets for each GPU
# RESTARTS        how often torchrun starts the ranks again
#
# A rank that dies or hangs (--inference-rank-timeout) ends the others, whose log names it; torchrun
# starts all of them again, as often as --max-restarts says. Clients see 503 with Retry-After
# meanwhile, from the same front end (--engine-restart-timeout must be longer than loading takes).
# SIGTERM to torchrun lets open requests finish first (--shutdown-timeout; torchrun itself gives up
# after 30 seconds).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)

config=${CONFIG:-$root/configs/launch/nemotron-h-8b-tensor-2.yaml}

# One thread of the CPU for each rank: its GPU does the work. torchrun says so too, with a warning.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# --standalone: a rendezvous of its own, on a free port, for this machine alone.
exec "${PYTHON:-python}" -m torch.distributed.run \
    --standalone \
    --nproc-per-node "${GPUS_PER_NODE:-2}" \
    --max-restarts "${RESTARTS:-10}" \
    "$root/tools/run_text_generation_server.py" \
    --config "$config" \
    --engine-restart-timeout 600 \
    "$@"

#!/usr/bin/env bash
# Eight GPUs of one machine for a mixture of experts: TP=2 x EP=4.
#
#     examples/launch/expert_parallel.sh
#     examples/launch/expert_parallel.sh --load DIR --load-format auto
#
# Attention and recurrent layers are split over two GPUs, and there are four such pairs, each with
# requests and a prefix cache of its own (a replica). The experts of a layer are shared out to all
# four: every GPU has an eighth of them, and the pairs compute each step together. One address
# answers for the four replicas; which one takes a request follows from what it has cached
# (--inference-dynamic-batching-prefix-caching-coordinator-policy).
#
# GPUS_PER_NODE, CONFIG, RESTARTS: as in tensor_parallel.sh. All eight ranks run in step, so a rank
# that dies ends all of them, and torchrun starts all of them again.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)

config=${CONFIG:-$root/configs/launch/qwen3-next-80b-a3b-tensor-2-expert-4.yaml}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec "${PYTHON:-python}" -m torch.distributed.run \
    --standalone \
    --nproc-per-node "${GPUS_PER_NODE:-8}" \
    --max-restarts "${RESTARTS:-10}" \
    "$root/tools/run_text_generation_server.py" \
    --config "$config" \
    --engine-restart-timeout 600 \
    "$@"

#!/usr/bin/env bash
# Two machines with two GPUs each: TP=2 in each machine, a pipeline of two stages across them. Run
# the same command on both:
#
#     HEAD=node-a examples/launch/two_nodes.sh            on node-a and on node-b
#     HEAD=node-a examples/launch/two_nodes.sh --host 0.0.0.0 --load DIR --load-format auto
#
# HEAD            host name or address of one of them, at which both reach its port 29400. There the
#                 two torchruns meet, so it is the one that must not be lost (see below)
# HEAD_PORT       another port than 29400
# JOB             a name; another one for another server on the same HEAD
# NODES, GPUS_PER_NODE, CONFIG, RESTARTS    as many machines and GPUs, and other sizes
#
# What the second machine needs:
# - the same version of this package and of torch, and the model's files under the same path;
# - to be reached from the first one on any port: process groups take free ones. With several
#   network interfaces set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the name of the one that
#   connects the machines (`ip route get ADDRESS` shows it), on both; the host name that each
#   machine gives itself must be known to the other (or give torchrun --local-addr). With InfiniBand
#   or RoCE NCCL finds the adapters itself; NCCL_IB_HCA picks some of them. NCCL_DEBUG=INFO shows
#   what was found;
# - no address for clients: HTTP is answered on one machine, that of the first rank, which says
#   "serving ... on ...". torchrun puts the machines in the order of their names.
#
# A rank that dies or hangs ends all ranks on both machines, whose logs name it, and both torchruns
# start theirs again. If the other machine is lost, the torchrun on HEAD waits ten minutes for it to
# come back (start the same command there). If HEAD is lost, so is the rendezvous: torchrun on the
# other one ends, and both have to be started again. So run this script under a supervisor on each
# machine (systemd with Restart=always, Kubernetes, Slurm with --requeue).
#
# torchrun takes 15 seconds to see that a machine is lost; --inference-rank-timeout must be longer,
# or torchrun counts the lost one in when it starts the ranks again, and fails.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)

: "${HEAD:?set HEAD to the name or address of the machine at which the two meet}"
config=${CONFIG:-$root/configs/launch/qwen3-next-80b-a3b-two-nodes.yaml}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# The ranks' store is started anew with them, in the first one's process, and not kept by torchrun
# for its whole life: torch up to 2.13 does not tell a machine that joins later where it is.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "${NODES:-2}" \
    --nproc-per-node "${GPUS_PER_NODE:-2}" \
    --max-restarts "${RESTARTS:-10}" \
    --rdzv-backend c10d \
    --rdzv-id "${JOB:-megatron-hybrid}" \
    --rdzv-endpoint "$HEAD:${HEAD_PORT:-29400}" \
    --rdzv-conf "${RENDEZVOUS:-keep_alive_interval=5}" \
    "$root/tools/run_text_generation_server.py" \
    --config "$config" \
    --engine-restart-timeout 900 \
    "$@"

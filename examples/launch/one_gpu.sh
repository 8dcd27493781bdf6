#!/usr/bin/env bash
# One GPU: the shape of Nemotron-H-8B with random weights, on port 5000.
#
#     examples/launch/one_gpu.sh
#     examples/launch/one_gpu.sh --load DIR --load-format auto        your model's weights
#     PYTHON=python3.12 examples/launch/one_gpu.sh --port 8000
#
# Flags after the script's name go to the server (--help lists them) and win over the file of
# options, whose comment says what fits into which memory.
#
# One process needs no torchrun. When it dies, its front end answers 503 and waits for the next one
# (--engine-restart-timeout): run this script under a supervisor that starts it again, such as
# systemd with Restart=on-failure, or
#
#     until examples/launch/one_gpu.sh; do sleep 1; done
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)

config=${CONFIG:-$root/configs/nemotron-h-8b.yaml}

exec "${PYTHON:-python}" "$root/tools/run_text_generation_server.py" --config "$config" "$@"

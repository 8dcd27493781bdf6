#!/usr/bin/env bash
# Makes the environment (once), starts the text server, asks it a question twice over HTTP, prints
# the answers and how many prompt tokens came from the cache, and leaves the server up (Ctrl-C ends
# it).
#
#   tools/setup_and_serve.sh                       the reference model that ships with the package
#   tools/setup_and_serve.sh --exit-after-answer   the same, and stop the server afterwards
#   tools/setup_and_serve.sh --load DIR --port N   another model; every flag of the server works
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment

system="You are a helpful assistant. Here is what you know about the house. The code of the garage \
door is 4821. The key of the cellar is under the blue flower pot. The neighbour on the left is \
called Martha, and the neighbour on the right is called Igor. The cat's name is Pixel. The bicycle \
is in the shed behind the house. The train to the city leaves at 7:45. The password of the wifi is \
maple. The red suitcase is in the attic, next to the old piano. The meeting of the choir is on \
Thursday. The oven in the kitchen is broken, and the freezer is in the basement."

# Flags of the caller come last and win over these.
exec "$VENV/bin/python" "$ROOT/tools/run_text_generation_server.py" \
    --system "$system" --ask "What is the code of the garage door?" "$@"

# Sourced by the other scripts: makes .venv in the repository's root and installs the package
# there with the extras that the caller names, unless that was done before for this setup.py.
#
#   . tools/environment.sh
#   ensure_environment            # the engine and its server
#   ensure_environment test       # and what the tests need
#   ensure_client_environment aiperf    # one of other people's clients, which tests/clients runs
#
# PYTHON names the interpreter to use; otherwise the first 3.11 or 3.12 that is found.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"

_is_usable_python() {
    # venv and ensurepip are separate packages on some distributions.
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
        >/dev/null 2>&1 </dev/null
}

_find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.11 python3.12 python; do
        if _is_usable_python "$candidate"; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    echo "No usable Python: this needs Python 3.11 or 3.12 with its venv module (Debian and" \
        "Ubuntu: the package python3-venv). Set PYTHON to name an interpreter." >&2
    return 1
}

_make_venv() {
    local venv=$1 python
    if [ -e "$venv" ] && ! _is_usable_python "$venv/bin/python"; then
        echo "== $venv belongs to another Python or is incomplete; making it anew"
        rm -rf "$venv"
    fi
    if [ ! -e "$venv" ]; then
        python=$(_find_python) || return 1
        echo "== making $venv with $("$python" --version)"
        "$python" -m venv "$venv" </dev/null || return 1
    fi
}

ensure_environment() {
    local extras=${1:-} target="." stamp stamps fingerprint
    [ -n "$extras" ] && target=".[$extras]"
    stamp="$VENV/.installed${extras:+-$extras}"

    _make_venv "$VENV" || return 1
    # The root is part of the fingerprint because an editable install points at it: a copied
    # checkout must not run the original's code.
    fingerprint=$(printf '%s\n' "$ROOT" | cat - "$ROOT/setup.py" | "$VENV/bin/python" -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
    stamps=("$stamp")
    # What the tests need includes what the engine needs.
    [ -z "$extras" ] && stamps+=("$VENV/.installed-test")
    if grep -qsx "$fingerprint" "${stamps[@]}"; then
        echo "== using $VENV (setup.py is unchanged)"
        return 0
    fi
    echo "== installing $target into $VENV (a few minutes the first time)"
    # In its own line, before our requirements: an old pip does not know how to install
    # pyproject projects in editable mode.
    # Modules are compiled as they are imported: most never are.
    (cd "$ROOT" && "$VENV/bin/python" -m pip install -qq --no-input --upgrade pip </dev/null &&
        "$VENV/bin/python" -m pip install -qq --no-input --no-compile --editable "$target" \
            </dev/null) || {
        echo "The installation failed; pip's message above says why." >&2
        return 1
    }
    printf '%s\n' "$fingerprint" >"$stamp"
}

# What tests/clients/requirements-NAME.txt lists, in an environment of its own: .venv-clients/NAME.
# Clients' requirements contradict each other's, and ours.
ensure_client_environment() {
    local venv="$ROOT/.venv-clients/$1" wanted="$ROOT/tests/clients/requirements-$1.txt"
    _make_venv "$venv" || return 1
    if cmp -s "$wanted" "$venv/.installed"; then
        return 0
    fi
    echo "== installing $wanted into $venv (about 1 GB; a few minutes the first time)"
    "$venv/bin/python" -m pip install -qq --no-input --upgrade pip </dev/null &&
        "$venv/bin/python" -m pip install -qq --no-input --no-compile -r "$wanted" </dev/null || {
        echo "The installation failed; pip's message above says why." >&2
        return 1
    }
    cp "$wanted" "$venv/.installed"
}

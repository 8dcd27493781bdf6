# Sourced by the other scripts: makes .venv in the repository's root and installs the package
# there with the extras that the caller names, unless that was done before for this setup.py.
#
#   . tools/environment.sh
#   ensure_environment            # the engine and its server
#   ensure_environment test       # and what the tests need
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

ensure_environment() {
    local extras=${1:-} target="." stamp stamps fingerprint python
    [ -n "$extras" ] && target=".[$extras]"
    stamp="$VENV/.installed${extras:+-$extras}"

    if [ -e "$VENV" ] && ! _is_usable_python "$VENV/bin/python"; then
        echo "== $VENV belongs to another Python or is incomplete; making it anew"
        rm -rf "$VENV"
    fi
    if [ ! -e "$VENV" ]; then
        python=$(_find_python) || return 1
        echo "== making $VENV with $("$python" --version)"
        "$python" -m venv "$VENV" </dev/null || return 1
    fi
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

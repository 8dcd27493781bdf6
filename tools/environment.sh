# Sourced by the other scripts: makes .venv in the repository's root and installs the package
# there with the extras that the caller names, unless that was done before for this setup.py.
#
#   . tools/environment.sh
#   ensure_environment            # the engine and its server
#   ensure_environment test       # and what the tests need
#   ensure_client_environment aiperf    # one of other people's clients, which tests/clients runs
#   ensure_deployments_environment      # what tests need with Dynamo and Ray: VENV is another one then
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

# Says what pip is doing: on a terminal in one line that changes, elsewhere in a line every so many
# seconds, with the time that has passed. From its first error on, all it says goes to stderr.
_show_progress() {
    local line state=starting failed="" began=$SECONDS next=$PROGRESS_SECONDS passed
    local second="-t 1"
    [ "${BASH_VERSINFO[0]}" -ge 4 ] || second="" # there the end looks like a second without a line
    while true; do
        if IFS= read -r $second line; then
            case $line in
            ERROR:* | error:* | Traceback*) failed=1 ;;
            "Collecting "*) state="looking for ${line#Collecting }" ;;
            *Downloading\ *) state="downloading ${line##*Downloading }" ;;
            *Installing\ build\ * | *Building\ *) state="building" ;;
            "Installing collected packages: "*) state="installing what was downloaded" ;;
            esac
            if [ -n "$failed" ] || [[ $line = "WARNING: Retrying "* ]]; then
                [ -t 1 ] && printf '\r\033[K'
                printf '%s\n' "$line" >&2
            fi
        elif [ $? -le 128 ]; then
            break # pip has ended; above 128 a second has passed without a line
        fi
        passed=$((SECONDS - began))
        if [ -t 1 ]; then
            printf '\r   %d:%02d  %.66s\033[K' $((passed / 60)) $((passed % 60)) "${state%% (from *}"
        elif [ "$passed" -ge "$next" ]; then
            next=$((passed + PROGRESS_SECONDS))
            printf '   %d:%02d  %.66s\n' $((passed / 60)) $((passed % 60)) "${state%% (from *}"
        fi
    done
    [ -t 1 ] && printf '\r\033[K'
    return 0
}
PROGRESS_SECONDS=20

# _pip_install VENV ARGUMENT...: modules are compiled as they are imported, since most never are.
_pip_install() {
    local venv=$1 status
    shift
    PYTHONUNBUFFERED=1 PIP_ROOT_USER_ACTION=ignore "$venv/bin/python" -m pip install --no-input \
        --disable-pip-version-check --progress-bar off --no-compile "$@" </dev/null 2>&1 |
        _show_progress
    status=${PIPESTATUS[0]}
    [ "$status" = 0 ] || echo "The installation failed; pip's message above says why." >&2
    return "$status"
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
    (cd "$ROOT" && _pip_install "$VENV" --upgrade pip &&
        _pip_install "$VENV" --editable "$target") || return 1
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
    _pip_install "$venv" --upgrade pip && _pip_install "$venv" -r "$wanted" || return 1
    cp "$wanted" "$venv/.installed"
}

# What the tests need, with Dynamo and Ray Serve, in .venv-deployments, which is VENV from here on:
# Dynamo wants some packages in versions of its own.
ensure_deployments_environment() {
    local wanted="$ROOT/configs/dynamo/requirements.txt" stamp
    VENV="$ROOT/.venv-deployments"
    ensure_environment test,ray || return 1
    stamp="$VENV/.installed-dynamo"
    if cmp -s "$wanted" "$stamp" && [ "$stamp" -nt "$VENV/.installed-test,ray" ]; then
        return 0
    fi
    echo "== installing $wanted into $VENV"
    _pip_install "$VENV" --no-deps -r "$wanted" || return 1
    cp "$wanted" "$stamp"
}

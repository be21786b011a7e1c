# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by the other scripts. Finds a Python and has scripts/environment.py make .venv with it; bash 3.2 is enough.

ROOT=$(CDPATH='' cd -- "${BASH_SOURCE[0]%/*}/.." && pwd)
# shellcheck disable=SC2034  # for the scripts that source this one
VENV=$ROOT/.venv

# Prints the first Python >= 3.11 that can make virtual environments. PYTHON, if set, is tried first.
find_python() {
    local candidate verdict without_venv=""
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python; do
        # Run it rather than look for it: version managers leave commands in PATH that only print an error.
        verdict=$("$candidate" -c '
import sys
if sys.version_info < (3, 11):
    sys.exit(1)
try:
    import ensurepip, venv
    print("good")
except ImportError:
    print("no venv")' 2>/dev/null) || continue
        if [ "$verdict" = good ]; then
            printf '%s\n' "$candidate"
            return
        fi
        without_venv=${without_venv:-$candidate}
    done
    if [ -n "$without_venv" ]; then
        echo "$without_venv is new enough but has no venv module. On Debian and Ubuntu: apt-get install python3-venv" >&2
    else
        echo "Python 3.11 or newer is needed and none is in PATH. Install one, or name it: PYTHON=/path/to/python3" >&2
    fi
    return 1
}

# prepare [--cupy-always] [extra:NAME | group:NAME]...
prepare() {
    local python
    python=$(find_python)
    "$python" "$ROOT/scripts/environment.py" "$@" </dev/null
}

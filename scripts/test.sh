#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the tests. Makes .venv on the first run.
#
#   scripts/test.sh [--with torch,jax] [pytest arguments]
#
# --with installs those (large) packages too; tests that miss them skip and say so. Arguments are relative to the
# top folder, such as `tests/pure -k slots`.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

with=""
pytest_arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        --with=*) with+=",${1#--with=}" ;;
        --with)
            [ $# -gt 1 ] || { echo "--with needs a value: torch, jax or torch,jax" >&2; exit 2; }
            with+=",$2"
            shift
            ;;
        *) pytest_arguments+=("$1") ;;
    esac
    shift
done

groups=()
IFS=, read -ra packages <<<"${with#,}"
for package in ${packages[@]+"${packages[@]}"}; do
    case $package in
        torch | jax) groups+=("group:$package") ;;
        *) echo "--with $package: only torch and jax are known" >&2; exit 2 ;;
    esac
done

# Without a GPU, CuPy still imports and NVRTC still compiles: tests of both need them everywhere.
prepare --cupy-always extra:plot group:test group:compile ${groups[@]+"${groups[@]}"}
cd "$ROOT"
exec "$VENV/bin/python" -m pytest --timeout 300 ${pytest_arguments[@]+"${pytest_arguments[@]}"}

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run every formatter and checker without changing a file; fails if one of them does. `--fix` formats first.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

prepare group:lint
cd "$ROOT"
PATH=$VENV/bin:$PATH

if [ "${1:-}" = --fix ]; then
    ruff check --quiet --fix . || true # what it cannot mend is listed below
    ruff format --quiet .
    clang-format -i kernels/*
fi

failed=0
check() {
    echo "== $*"
    "$@" || failed=1
}
check ruff check --output-format concise .
check ruff format --check --output-format concise .
check mypy
check lint-imports --no-logo
check clang-format --dry-run --Werror kernels/*
check shellcheck --external-sources scripts/*.sh .ci/run
exit $failed

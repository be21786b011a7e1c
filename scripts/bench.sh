#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Time the decode operations. Makes .venv on the first run; every argument goes to `kda-cupy bench decode`.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

plot=""
for argument in "$@"; do
    case $argument in --plot | --plot=*) plot=extra:plot ;; esac
done
prepare ${plot:+"$plot"}
exec "$VENV/bin/kda-cupy" bench decode "$@"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the documentation into site/, every warning (a link that leads nowhere) an error. `scripts/docs.sh serve` shows
# it at http://127.0.0.1:8000 and builds anew what changes.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

prepare group:docs
cd "$ROOT"
export NO_MKDOCS_2_WARNING=1
if [ "${1:-build}" = serve ]; then
    exec "$VENV/bin/python" -m mkdocs serve
fi
"$VENV/bin/python" -m mkdocs build --strict --quiet --clean
echo "site/index.html"

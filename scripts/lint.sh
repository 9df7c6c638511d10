#!/usr/bin/env bash
# ruff check (import direction included), ruff format --check and mypy, for CI and for pre-commit.
# All run; the exit status is 1 if any of them fails.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$root"
prepare_env dev
status=0
for check in "ruff check ." "ruff format --check ." "mypy"; do
    "$python" -m $check || status=1 # unquoted on purpose: the words are arguments
done
exit $status

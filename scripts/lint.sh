#!/usr/bin/env bash
# ruff check (import direction included), ruff format --check, mypy, and no source file over 400
# lines, for CI and for pre-commit. All run; the exit status is 1 if any of them fails.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$root"
prepare_env
status=0
for check in "ruff check ." "ruff format --check ." "mypy"; do
    "$python" -m $check || status=1 # unquoted on purpose: the words are arguments
done
long=$(find titan_fp8 tests scripts configs \( -name "*.py" -o -name "*.c" -o -name "*.sh" \) \
    -exec wc -l {} + | awk '$1 > 400 && $2 != "total"')
if [[ -n $long ]]; then
    printf 'files of more than 400 lines:\n%s\n' "$long"
    status=1
fi
exit $status

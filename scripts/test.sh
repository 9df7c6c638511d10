#!/usr/bin/env bash
# Lint, format and tests. Arguments go to pytest: ./scripts/test.sh -k compare
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$root"
prepare_env
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m pytest tests -q "$@"
if "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
    exec ./scripts/test_gpu.sh
fi

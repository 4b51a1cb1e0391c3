#!/usr/bin/env bash
# Everything a change must pass: lint, csrc compiles, tests. Arguments go to pytest:
#
#   bash scripts/test.sh                    # the default suite
#   bash scripts/test.sh tests/data -k idx  # part of it
#   bash scripts/test.sh --slow             # with the tests that take minutes
#
# TEST_WORKERS sets the processes that run tests (default 2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SETUP_EXTRAS=dev,plot SETUP_OPTIONAL=fast
. scripts/setup.sh
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

echo "== lint"
ruff check .
ruff format --check .

echo "== csrc"
bash scripts/check_csrc.sh

echo "== tests"
python -m pytest -n "${TEST_WORKERS:-2}" --dist worksteal "$@"

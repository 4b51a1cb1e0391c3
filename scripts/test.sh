#!/usr/bin/env bash
# Everything a change must pass: lint, types, csrc compiles, tests. Arguments go to pytest:
#
#   bash scripts/test.sh                    # the default suite; with CI=true also a wheel and the site of the docs
#   bash scripts/test.sh --fast             # what a commit waits for: lint, and the tests of about a minute
#   bash scripts/test.sh tests/data -k idx  # these tests, and nothing else
#   bash scripts/test.sh --slow             # with the tests that take minutes
#
# One file runs in this process; anything more is shared out to workers.
# TEST_WORKERS sets the processes that run tests (default 2). At the end it says what each step took.
set -euo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SETUP_EXTRAS=dev,plot,objects,inputs SETUP_OPTIONAL=fast
if [[ " $* " == *" --slow "* ]]; then SETUP_EXTRAS+=,notebook,servers,clients,ray,harness,serve; fi
. scripts/setup.sh
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

# A hook of git names the repository to every git that tests call, for repositories of their own too.
if command -v git >/dev/null; then
    # shellcheck disable=SC2046
    unset $(git rev-parse --local-env-vars)
fi

taken=()
trap 'echo "== took: ${taken[*]:-nothing}; $SECONDS s in all"' EXIT

# step NAME COMMAND...
step() {
    local name=$1 begun=$SECONDS status=0
    shift
    echo "== $name"
    "$@" || status=$?
    taken+=("$name $((SECONDS - begun)) s")
    return "$status"
}

lint() {
    ruff check . && ruff format --check .
}

# The types of arrays have defaults from numpy 2.3 on, which needs Python 3.11.
types() {
    if python -c 'import sys; sys.exit(sys.version_info >= (3, 11))'; then
        echo "types: not checked with Python 3.10"
    else
        mypy
    fi
}

# What is named on the command line runs by itself, at once.
named=() files=0 fast=
for word in "$@"; do
    if [[ -e ${word%%::*} ]]; then named+=("$word"); fi
    if [[ -f ${word%%::*} ]]; then files=$((files + 1)); fi
    if [[ $word == --fast ]]; then fast=1; fi
done
workers=(-n "${TEST_WORKERS:-2}" --dist worksteal)
if [[ ${#named[@]} == 1 && $files == 1 ]]; then workers=(); fi

if [[ ${#named[@]} == 0 ]]; then
    step lint lint
    if [[ -z $fast ]]; then
        step types types
        step csrc bash scripts/check_csrc.sh
    fi
    if [[ -n ${CI:-} ]]; then
        step wheel bash scripts/check_wheel.sh
        step docs bash scripts/build_docs.sh
    fi
fi
step tests python -m pytest ${workers[@]+"${workers[@]}"} "$@"

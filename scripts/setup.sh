# shellcheck shell=bash
# Prepares Python for the other scripts, which source this file from the repository root:
#
#   SETUP_EXTRAS=plot . scripts/setup.sh
#
# Uses the active virtual environment, or makes .venv. Installs torch by its exact version (unless a torch
# from 2.10 on is there already: then torch and everything else that is installed stay as they are), the
# other dependencies as pinned in constraints.txt, megazero itself (editable), and builds csrc. When run again,
# it finds its stamp and does nothing.
#
# SETUP_EXTRAS    extras of setup.py that must be there, separated by commas
# SETUP_OPTIONAL  extras that make things faster; without them a message, not a failure
# SETUP_WHEELS    a folder of wheels, from which alone pip installs: nothing is asked of a network
# SETUP_SKIP      take the active Python as it is, and install nothing
# PYTHON          the Python (>= 3.10) to make .venv from
#
# Afterwards `python` is the environment's own.

setup_say() { echo "setup: $*"; }

setup_die() {
    echo "setup: error: $*" >&2
    exit 1
}

# The first Python from 3.10 on. Version managers leave names on the PATH that fail, hence the trial.
setup_find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python python3.12 python3.11 python3.10; do
        if [[ -n $candidate ]] &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    setup_die "Python must be 3.10 or newer, but none such is on the PATH; install one or set PYTHON to it."
}

# Makes `python` the environment's own.
setup_activate() {
    local found
    if [[ -n ${VIRTUAL_ENV:-} ]]; then
        export PATH="$VIRTUAL_ENV/bin:$PATH"
        return
    fi
    found=$(setup_find_python)
    if "$found" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
        # This Python is an environment's, though nobody activated it (as in many containers).
        VIRTUAL_ENV=$("$found" -c 'import sys; print(sys.prefix)')
    else
        VIRTUAL_ENV=$PWD/.venv
        if ! "$VIRTUAL_ENV/bin/python" -c '' 2>/dev/null; then
            setup_say "making .venv with $("$found" --version)"
            local flags=()
            # A machine with a torch of its own (its GPU's) lends it.
            if [[ -n $("$found" scripts/setup_facts.py torch) ]]; then flags=(--system-site-packages); fi
            "$found" -m venv --clear ${flags[@]+"${flags[@]}"} "$VIRTUAL_ENV" ||
                setup_die "no virtual environment could be made; install Python's venv module (python3-venv)."
        fi
    fi
    export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH"
}

# `pip install`, which says what it downloads and how far it is.
setup_pip() { python scripts/pip_progress.py "$@"; }

# csrc is compiled while torch comes: one keeps a core busy, the other the disk and the network. torch comes alone and
# before the rest: as a requirement of others, the resolver would choose a version of its own.
setup_install() {
    local constraints=$1 compiling
    if [[ -n ${SETUP_WHEELS:-} ]]; then export PIP_NO_INDEX=1 PIP_FIND_LINKS=$SETUP_WHEELS; fi
    python -m pip --version >/dev/null 2>&1 || python -m ensurepip >/dev/null ||
        setup_die "the environment $VIRTUAL_ENV must have pip, but has none; install it there."
    python scripts/setup_facts.py constraints >"$constraints"
    # The build tools live in the environment too, so that pip need not make another one for each build.
    setup_pip -c "$constraints" "setuptools>=68" "pybind11>=2.12" "ninja>=1.11" ||
        setup_die "the build tools could not be installed; see above."
    setup_say "compiling csrc meanwhile, see build/native.log"
    setup_build_native &
    compiling=$!
    if [[ -z $(python scripts/setup_facts.py torch) ]]; then
        setup_say "torch 2.13.0, which is most of what comes"
        setup_pip -c constraints.txt torch==2.13.0 || setup_die "torch could not be installed; see above."
    fi
    python scripts/setup_facts.py constraints >"$constraints"
    setup_wait_for_native "$compiling"
    setup_say "the other dependencies${SETUP_EXTRAS:+ and the extras $SETUP_EXTRAS}"
    if [[ -n ${SETUP_OPTIONAL:-} ]]; then
        if setup_self "${SETUP_EXTRAS:+$SETUP_EXTRAS,}$SETUP_OPTIONAL" --retries 1 --timeout 15 2>/dev/null; then return; fi
        setup_say "trying without the extra $SETUP_OPTIONAL, which makes things faster but is not to be had here"
    fi
    setup_self "${SETUP_EXTRAS:-}" || setup_die "the dependencies could not be installed; see above."
}

# megazero with these extras, and what they need; csrc has been compiled for the CPU by then.
setup_self() {
    MEGAZERO_CPU=0 setup_pip -c "$constraints" --no-build-isolation --editable ".${1:+[$1]}" "${@:2}"
}

# Compiles csrc for the CPU in place, from scratch: the build's own time stamps do not see changed headers. The extension
# is optional, so a build that fails says so by leaving nothing. CUDA's kernels follow with megazero itself, once
# torch is there to say whether it is for CUDA.
setup_build_native() {
    local folder=build/native log=build/native.log old
    while IFS= read -r old; do
        if [[ -n $old ]]; then rm -f "$old"; fi
    done < <(python scripts/setup_facts.py native)
    rm -rf "$folder"
    mkdir -p "$folder"
    MEGAZERO_CUDA=0 python setup.py build_ext --inplace --force --build-temp "$folder/temp" --build-lib "$folder/lib" \
        >"$log" 2>&1 || true
    if [[ -n $(python scripts/setup_facts.py missing) ]]; then
        setup_say "csrc was not compiled (is there a C++ compiler? see $log); numpy and torch do its work, slower"
    fi
}

# Waits for the process that compiles csrc, and says after 10 seconds, 20, 40 and so on how far it is.
setup_wait_for_native() {
    local waited=0 due=10
    while kill -0 "$1" 2>/dev/null; do
        if ((waited == due)); then
            setup_say "compiling csrc: $(find build/native -name '*.o' 2>/dev/null | wc -l) files compiled, waited $waited s for it"
            due=$((due * 2))
        fi
        sleep 1
        waited=$((waited + 1))
    done
    wait "$1"
}

# Whether every requested extra has been set up from the current inputs.
setup_is_done() {
    local key extra
    key=$(python scripts/setup_facts.py key)
    for extra in base ${SETUP_EXTRAS//,/ }; do
        [[ $(cat "$VIRTUAL_ENV/.megazero/$extra" 2>/dev/null) == "$key" ]] || return 1
    done
}

# Every process imports torch: without its bytecode each compiles it again, which doubles the time to start.
unset PYTHONDONTWRITEBYTECODE

setup_main() {
    local started=$SECONDS stamps extra
    if [[ -n ${SETUP_SKIP:-} ]]; then return; fi
    setup_activate
    stamps=$VIRTUAL_ENV/.megazero
    if setup_is_done; then return; fi
    mkdir -p "$stamps"
    # Two scripts that start at once must not install at once.
    if command -v flock >/dev/null; then
        exec 9>"$stamps/lock"
        flock 9
    fi
    if ! setup_is_done; then
        setup_install "$stamps/constraints.txt"
        for extra in base ${SETUP_EXTRAS//,/ }; do
            python scripts/setup_facts.py key >"$stamps/part"
            mv "$stamps/part" "$stamps/$extra"
        done
        setup_say "done in $((SECONDS - started)) s"
    fi
    exec 9>&-
}

setup_main

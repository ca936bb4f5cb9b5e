# Sourced, not run, by tools/test.sh and tools/quickstart.sh, with the project's root as the working folder. POSIX sh.
#
#   make_environment NAME EXTRAS    makes the virtual environment ./NAME with this project installed in it (editable) with EXTRAS, as in
#                                   "train,mpi"; does nothing when it is there and up to date. Sets ENVIRONMENT_PYTHON to its interpreter (an
#                                   absolute path). Returns 1 after a message on standard error when that can't be done.
#
# The interpreter is $PYTHON, or the first of python3, python3.11 ... python3.14 that is 3.11 or newer.
#
# The folder may have spaces in its name. The scripts in NAME/bin then start through a /bin/sh line that pip writes for such folders; still,
# call a tool as "$ENVIRONMENT_PYTHON" -m TOOL where it can be: that needs no first line at all.

environment_say() {
    printf '%s\n' "environment: $*" >&2
}

# Prints the interpreter to use.
environment_find_python() {
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13 python3.14; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' </dev/null 2>/dev/null; then
            printf '%s\n' "$candidate"
            return 0
        fi
        if [ -n "${PYTHON:-}" ]; then
            environment_say "PYTHON=$PYTHON is no Python 3.11 or newer"
            return 1
        fi
    done
    environment_say "no Python 3.11 or newer found: install one, or name it, as in PYTHON=/path/to/python3.12"
    return 1
}

# What the environment was made from: with another text here it is refreshed. The folder is part of it: a virtual environment can't be moved.
environment_fingerprint() {
    printf '%s %s\n' "$PWD/$1" "$2"
    "$3" -c 'import sys; print(sys.version, sys.base_prefix)' </dev/null
    cksum setup.cfg pyproject.toml tools/constraints.txt
}

make_environment() {
    [ -f setup.cfg ] && [ -f tools/constraints.txt ] || { environment_say "call this from the project's root, not from $PWD"; return 1; }
    environment_base=$(environment_find_python) || return 1
    ENVIRONMENT_PYTHON=$PWD/$1/bin/python
    environment_wanted=$(environment_fingerprint "$1" "$2" "$environment_base") || return 1
    if [ "$(cat "$1/made-from.txt" 2>/dev/null)" = "$environment_wanted" ] && "$ENVIRONMENT_PYTHON" -I -c 'import mpipipe' </dev/null 2>/dev/null; then
        return 0
    fi
    environment_say "making $1 with [$2]; the first time takes some minutes"
    rm -f "$1/made-from.txt"
    if ! "$environment_base" -m venv --clear "$1" </dev/null; then
        environment_say "'$environment_base -m venv' failed; on Debian and Ubuntu it needs the package python3-venv"
        return 1
    fi
    if ! environment_pip setuptools || ! environment_pip --no-build-isolation -e ".[$2]"; then
        environment_say "pip could not install the packages; the lines above say why. Nothing outside $1 was changed"
        return 1
    fi
    printf '%s\n' "$environment_wanted" >"$1/made-from.txt"
}

environment_pip() {
    PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 \
        "$ENVIRONMENT_PYTHON" -m pip install -qq --no-input -c tools/constraints.txt "$@" </dev/null
}

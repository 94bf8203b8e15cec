#!/usr/bin/env bash
# All that needs a GPU, in one go and in under eight minutes by its own clock: for a machine that is lent for minutes.
#
#     OUT=folder bash tests/gpu_check.sh --data FOLDER        FOLDER has MNIST's four files
#
# From any folder, with nothing installed but what minigrad imports, CuPy and pytest (PyTorch, for the bench's peers).
# Linux: it needs GNU timeout. $PYTHON is the Python to use (python3). If the machine gets only a copy of the working
# tree, put MNIST's files into a folder of it that git ignores (.mnist, say), send that too, and run there
#
#     OUT=$OUT bash tests/gpu_check.sh --data .mnist
#
# In $OUT, at most eight files, each there as soon as its stage ends or is stopped:
#     summary.txt                        a line a stage: passed, failed or ran out of time, seconds, the main figures
#     environment.txt                    card, driver, versions, commit
#     tests.txt                          pytest -m gpu, test by test
#     bench.txt bench.json bench.png     tasks/bench --device gpu
#     mnist.csv mnist.png                three minutes of tasks/pixel_mnist.py --paper --device gpu: log, figure
#
# Flags: --data FOLDER         else $MINIGRAD_DATA, ~/.cache/minigrad; without the files the last stage is skipped
#        --limits T,B,M        seconds for tests, bench, MNIST (150,180,180), less where less is left
#        --total N             seconds for everything (470); --grace N: what a stage has to end after its limit (20)
#
# Exit status: 0 all passed (or skipped), 1 a stage failed or ran out of time, 2 no GPU that works, a
# wrong flag or variable: nothing is run.
set -u

began_in=$PWD
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
data='' total=470 grace=20 tests_limit=150 bench_limit=180 mnist_limit=180
stages="environment tests bench mnist"
declare -A line                                     # stage -> its line of the summary
child='' work='' failed=0

fail() { echo "error: $1" >&2; exit 2; }

number() { [[ $2 =~ ^(0|[1-9][0-9]{0,5})$ ]] || fail "$1 is '$2'; expected a whole number of seconds"; }

from_here() { case $1 in /*) echo "$1" ;; *) echo "$began_in/$1" ;; esac; }

while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n '2,/^set -u/{/^#/!d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        --data | --limits | --total | --grace) [ $# -gt 1 ] || fail "$1 needs a value" ;;
        *) fail "$1 is no flag of gpu_check.sh; see --help" ;;
    esac
    case $1 in
        --data) data=$(from_here "$2"); [[ -n $2 && -d $data ]] || fail "--data is '$2'; expected a folder" ;;
        --limits)
            IFS=, read -r tests_limit bench_limit mnist_limit <<< "$2"
            for each in "$tests_limit" "$bench_limit" "$mnist_limit"; do number "a limit in --limits" "$each"; done ;;
        --total) number --total "$2"; total=$2 ;;
        --grace) number --grace "$2"; grace=$2 ;;
    esac
    shift 2
done

# ---- is there a GPU? ---------------------------------------------------------------------------------------------

case $python in */*) python=$(from_here "$python") ;; esac
cd "$root" || exit 2
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1             # other plugins are no part of this
said=$(timeout --foreground 60 "$python" -c '
from minigrad import backend
try:
    backend.require_working("gpu")
    print("problem:", None)
except backend.DeviceError as error:
    print("problem:", error)' 2>&1)
case $? in
    0) ;;
    124) fail "the GPU did not answer in 60 s; nothing was run" ;;
    126 | 127) fail "PYTHON is '$python'; expected a Python that can be run; nothing was run" ;;
    *) fail "$python cannot import minigrad: ${said##*$'\n'}; nothing was run" ;;
esac
problem=$(sed -n 's/^problem: //p' <<< "$said")                      # among the warnings of what is imported
[ "$problem" = None ] || fail "$problem; nothing was run"

if [ -n "${OUT:-}" ]; then
    out=$(from_here "$OUT")
    { mkdir -p "$out" && touch "$out/summary.txt"; } 2> /dev/null ||
        fail "OUT is '$OUT'; expected a folder that can be written; nothing was run"
else
    out=$(mktemp -d "${TMPDIR:-/tmp}/gpu_check.XXXXXX" 2> /dev/null) ||
        fail "TMPDIR is '${TMPDIR:-/tmp}'; expected a folder that can be written; nothing was run"
fi
work=$(mktemp -d 2> /dev/null) ||
    fail "TMPDIR is '${TMPDIR:-/tmp}'; expected a folder that can be written; nothing was run"
for file in summary.txt environment.txt tests.txt bench.txt bench.json bench.png mnist.csv mnist.png; do
    rm -f "$out/$file"                              # of an earlier run
done
echo "results: $out"

# ---- stages ------------------------------------------------------------------------------------------------------

write_summary() {
    local name
    {
        echo "gpu_check.sh, $SECONDS s of $total: $1"
        for name in $stages; do
            printf '%-12s %s\n' "$name" "${line[$name]:-not begun}"
        done
    } > "$out/summary.txt"
}

# note STAGE OUTCOME SECONDS [FIGURES]: its line of the summary, which is written anew.
note() {
    line[$1]=$(printf '%-16s %4s s   %s' "$2" "$3" "${4:-}")
    write_summary "going on"
    echo "$1: $2, $3 s${4:+: $4}"
}

# allowed SECONDS: so many, less where less is left.
allowed() {
    local left=$((total - SECONDS - grace))
    echo $((left < $1 ? left : $1))
}

figures() { timeout --kill-after=1 20 "$python" tests/support/gpu_check_figures.py "$@" 2>&1 | tail -n 1; }

default_interrupt=()                                # a command in the background of a script ignores SIGINT
if env --default-signal=INT true 2> /dev/null; then default_interrupt=(env --default-signal=INT); fi

# stage NAME LIMIT LOG CLEAN FIGURES command...: what it prints is in LOG; SIGINT at its limit, SIGKILL $grace seconds
# after that. CLEAN is the exit status with which a command that was interrupted has ended as it should ("": none).
# FIGURES is the file whose figures the summary shows.
stage() {
    local name=$1 limit log=$3 clean=$4 shows=$5 began=$SECONDS code outcome seconds figure
    limit=$(allowed "$2")
    shift 5
    if [ "$limit" -lt 1 ]; then
        failed=1
        note "$name" "no time left" 0
        return
    fi
    line[$name]="began at $began s, not ended"
    write_summary "going on"
    timeout ${clean:+--preserve-status} --signal=INT --kill-after="$grace" "$limit" \
        "${default_interrupt[@]}" "$@" > "$log" 2>&1 < /dev/null &
    child=$!
    wait "$child"
    code=$? child='' seconds=$((SECONDS - began))
    [ "$name" != mnist ] || keep_mnist
    figure=$(figures "$name" "$shows")
    case $code in
        0) outcome=passed ;;
        124 | 137) outcome="ran out of time" ;;
        *) outcome="failed ($code)" ;;
    esac
    if [ "$code" = "$clean" ]; then                 # stopped at its limit, and has something to show by then
        outcome=passed
        grep -q '^[1-9]' "$shows" 2> /dev/null || outcome="ran out of time"
    fi
    if [ "$outcome" != passed ]; then
        failed=1
        if [ "$name" = mnist ] || [[ $figure == "no figures"* ]]; then
            figure="$figure; last line: $(grep -v '^ *$' "$log" | tail -n 1 | cut -c 1-200)"
        fi
        tail -n 15 "$log" | sed 's/^/    /'
    fi
    note "$name" "$outcome" "$seconds" "$figure"
}

keep_mnist() {
    [ ! -e "$work/run/log.csv" ] || cp "$work/run/log.csv" "$out/mnist.csv"
    [ ! -e "$work/run/figure5.png" ] || cp "$work/run/figure5.png" "$out/mnist.png"
}

# shellcheck disable=SC2329    # the traps call these two
clean_up() {
    [ -z "$child" ] || { kill -INT "$child" 2> /dev/null; wait "$child"; }
    keep_mnist
    rm -rf "$work" "$out/bench.json.part"
}
# shellcheck disable=SC2329
stopped() { write_summary "stopped by a signal"; exit $((128 + $1)); }
trap clean_up EXIT
trap 'stopped 2' INT
trap 'stopped 15' TERM
trap 'stopped 1' HUP

has_images() {                                      # there, or one folder below
    compgen -G "$1/train-images*idx3-ubyte*" > /dev/null || compgen -G "$1/*/train-images*idx3-ubyte*" > /dev/null
}

stage environment 60 "$out/environment.txt" "" "$out/environment.txt" \
    "$python" tests/support/gpu_check_figures.py describe

# Only the files that have tests for a GPU: collecting all takes long. Warnings are shown and are no errors: they may
# come from the versions of CuPy and NumPy there.
mapfile -t files < <(grep -lF mark.gpu tests/*.py tests/*/*.py)
stage tests "$tests_limit" "$out/tests.txt" "" "$out/tests.txt" \
    "$python" -m pytest -m gpu -v -W default --tb=short --durations=10 -p no:cacheprovider \
    --continue-on-collection-errors "${files[@]}"

seconds=$(($(allowed "$bench_limit") * 5 / 6))      # the rest is for the row that is being measured then
stage bench "$bench_limit" "$out/bench.txt" "" "$out/bench.json" \
    "$python" tasks/bench --device gpu --json "$out/bench.json" --out "$out/bench.png" \
    --seconds "$((seconds > 0 ? seconds : 0))"

if [ -n "$data" ]; then
    has_images "$data" || { failed=1; note mnist failed 0 "no MNIST files in $data"; }
else
    for folder in "${MINIGRAD_DATA:-}" ~/.cache/minigrad; do
        if [ -z "$data" ] && [ -n "$folder" ] && has_images "$folder"; then data=$folder; fi
    done
    [ -n "$data" ] || note mnist skipped 0 "no MNIST files found; --data FOLDER says where they are"
fi
if [ -z "${line[mnist]:-}" ]; then
    stage mnist "$mnist_limit" "$work/mnist.txt" 130 "$out/mnist.csv" \
        "$python" tasks/pixel_mnist.py --paper --device gpu --data "$data" --out "$work/run"
fi

if [ "$failed" = 0 ]; then write_summary "all passed"; else write_summary "not all passed"; fi
cat "$out/summary.txt"
exit "$failed"

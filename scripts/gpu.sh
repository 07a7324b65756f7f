#!/usr/bin/env bash
# What needs a GPU, in stages that are processes of their own, each with its own time limit and log. It needs no network:
# the library may have been built elsewhere (docs/guide/gpu.md).
#   scripts/gpu.sh hot          models' widths against the CPU
#   scripts/gpu.sh test         a sweep of every operator against the CPU, first calls inside a CUDA graph, large tensors,
#                               random arguments, C++ tests, Python tests
#   scripts/gpu.sh sanitize     compute-sanitizer on models' widths and a short sweep
#   scripts/gpu.sh benchmark    kernels beside a device copy (BENCHMARK_ARGS=--peers: and beside peers)
#   scripts/gpu.sh profile      what Nsight Compute counts in one call of each kernel
#   scripts/gpu.sh --budget 540 short    of all that, what one call of nine minutes can tell; each stage gets what is left
#   --cases FILE                benchmark and profile: the cases with these names, one a line, in this order
# OUT: a folder for logs and tables. BUILD: the build folder, for the C++ tests. PYTHON: with torch, pytest and posembed's
# library in python/posembed.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${BUILD:=build/dev}" "${PYTHON:=python3}" "${OUT:=$BUILD/gpu}" "${PYTEST_ARGS:=}" "${BENCHMARK_ARGS:=}"
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"
failed=0 budget=86400 cases=()
while [[ ${1:-} == --* ]]; do
  case $1 in
    --budget) budget=$2 ;;
    --cases) cases=(--cases "$2") ;;
    *) echo "scripts/gpu.sh: no option '$1'; there are --budget and --cases" >&2; exit 2 ;;
  esac
  shift 2
done
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "skipped: torch finds no CUDA device"
  exit 0
fi

# stage NAME SECONDS COMMAND…: fewer seconds if the budget ends before.
stage() {
  local name=$1 limit=$2 began=$SECONDS status left=$((budget - SECONDS - 15))
  shift 2
  if ((left < 5)); then
    echo "$name: not run, the budget of $budget s is spent"
    failed=1
    return
  fi
  ((limit < left)) || limit=$left
  timeout --signal=INT --kill-after=10 "$limit" "$@" > "$OUT/$name.log" 2>&1
  status=$?
  echo "$name: $(tail -1 "$OUT/$name.log" | cut -c1-100) (exit $status, $((SECONDS - began)) s)"
  [ $status = 0 ] || failed=1
}

# The C++ tests find the libraries of torch wherever they are on this machine.
library_path() {
  "$PYTHON" - <<'EOF'
import pathlib, torch
root = pathlib.Path(torch.__file__).parent
print(":".join(map(str, [root / "lib", *root.parent.glob("nvidia/*/lib")])))
EOF
}

hot() { stage hot 60 "$PYTHON" tests/gpu/sweep.py --hot; }

test_() {
  local libraries
  libraries="$PWD/python/posembed/lib:$(library_path)"
  stage sweep 300 "$PYTHON" tests/gpu/sweep.py
  stage capture 120 "$PYTHON" tests/gpu/capture.py
  stage large 120 "$PYTHON" tests/gpu/large.py
  stage fuzz 120 "$PYTHON" tests/fuzz/operators.py --device cuda --calls 5000
  if [ -x "$BUILD/tests/cpp/test_modules" ]; then
    stage cpp 120 env LD_LIBRARY_PATH="$libraries" "$BUILD/tests/cpp/test_modules" --gtest_filter='*Cuda*'
  fi
  pytest_ 600
}

# pytest_ SECONDS [ARGUMENT…]
pytest_() {
  OMP_NUM_THREADS=1 stage pytest "$1" "$PYTHON" -m pytest -m 'gpu and not slow' -q --tb=short --timeout 90 \
    --numprocesses auto --maxprocesses 12 --dist worksteal --continue-on-collection-errors "${@:2}" $PYTEST_ARGS
}

# What torch asks the CUDA runtime in vain is no fault: launches check their errors themselves.
sanitize() { for tool in memcheck racecheck synccheck; do sanitize_by $tool 300 --quick; done; }

# sanitize_by TOOL SECONDS SWEEP: --quick or --hot.
sanitize_by() {
  stage "$1" "$2" compute-sanitizer --tool "$1" --report-api-errors no --kernel-name kns=posembed --error-exitcode 1 \
    "$PYTHON" tests/gpu/sweep.py "$3" --no-poison
}

# benchmark [SECONDS [ARGUMENT…]]
benchmark() {
  stage benchmark "${1:-600}" "$PYTHON" benchmarks/cuda.py --table "$OUT/benchmark.md" "${cases[@]}" "${@:2}" $BENCHMARK_ARGS
}

profile() {
  local metrics=gpu__time_duration.sum,dram__bytes.sum,smsp__inst_executed.sum
  metrics+=,smsp__issue_active.avg.pct_of_peak_sustained_active,sm__warps_active.avg.pct_of_peak_sustained_active
  metrics+=,launch__registers_per_thread,launch__grid_size,launch__block_size
  stage profile 300 ncu --clock-control none --kernel-name-base demangled --kernel-name regex:posembed \
    --metrics $metrics --csv "$PYTHON" benchmarks/cuda.py --once "${cases[@]}" $BENCHMARK_ARGS
}

# Right results first; then rows whose kernels have changed since they were timed; then what finds races.
short() {
  hot
  ((failed)) && return
  benchmark 150 --stale
  sanitize_by memcheck 60 --hot
  sanitize_by racecheck 60 --hot
  stage capture 60 "$PYTHON" tests/gpu/capture.py
  pytest_ 90 -k 'quantized or ngram or host or by_head or apart'
  stage sweep 300 "$PYTHON" tests/gpu/sweep.py
}

for one in "$@"; do
  case $one in
    test) test_ ;;
    hot | sanitize | benchmark | profile | short) $one ;;
    *) echo "scripts/gpu.sh: no stage '$one'; there are hot, test, sanitize, benchmark, profile and short" >&2; exit 2 ;;
  esac
done
exit $failed

#!/usr/bin/env bash
# What needs a GPU, in stages that are processes of their own, each with its own time limit and log. It needs no network:
# the library may have been built elsewhere (docs/guide/gpu.md).
#   scripts/gpu.sh test         a sweep of every operator against the CPU, first calls inside a CUDA graph, large tensors,
#                               random arguments, C++ tests, Python tests
#   scripts/gpu.sh sanitize     compute-sanitizer on a short sweep
#   scripts/gpu.sh benchmark    kernels beside a device copy and peers
#   scripts/gpu.sh profile      what Nsight Compute counts in one call of each kernel
# OUT: a folder for logs and tables. BUILD: the build folder, for the C++ tests. PYTHON: with torch, pytest and posembed's
# library in python/posembed.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${BUILD:=build/dev}" "${PYTHON:=python3}" "${OUT:=$BUILD/gpu}" "${PYTEST_ARGS:=}" "${BENCHMARK_ARGS:=}"
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"
failed=0
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "skipped: torch finds no CUDA device"
  exit 0
fi

# stage NAME SECONDS COMMAND…
stage() {
  local name=$1 limit=$2 began=$SECONDS status
  shift 2
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
  OMP_NUM_THREADS=1 stage pytest 600 "$PYTHON" -m pytest -m 'gpu and not slow' -q --tb=short --timeout 90 \
    --numprocesses auto --maxprocesses 12 --dist worksteal --continue-on-collection-errors $PYTEST_ARGS
}

# What torch asks the CUDA runtime in vain is no fault: launches check their errors themselves.
sanitize() {
  for tool in memcheck racecheck synccheck; do
    stage $tool 300 compute-sanitizer --tool $tool --report-api-errors no --kernel-name kns=posembed --error-exitcode 1 \
      "$PYTHON" tests/gpu/sweep.py --quick --no-poison
  done
}

benchmark() { stage benchmark 600 "$PYTHON" benchmarks/cuda.py --table "$OUT/benchmark.md" $BENCHMARK_ARGS; }

profile() {
  local metrics=gpu__time_duration.sum,dram__bytes.sum,smsp__inst_executed.sum
  metrics+=,smsp__issue_active.avg.pct_of_peak_sustained_active,sm__warps_active.avg.pct_of_peak_sustained_active
  metrics+=,launch__registers_per_thread,launch__grid_size,launch__block_size
  stage profile 300 ncu --clock-control none --kernel-name-base demangled --kernel-name regex:posembed \
    --metrics $metrics --csv "$PYTHON" benchmarks/cuda.py --once $BENCHMARK_ARGS
}

for one in "$@"; do
  case $one in
    test) test_ ;;
    sanitize | benchmark | profile) $one ;;
    *) echo "scripts/gpu.sh: no stage '$one'; there are test, sanitize, benchmark and profile" >&2; exit 2 ;;
  esac
done
exit $failed

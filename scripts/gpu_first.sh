#!/usr/bin/env bash
# Everything that needs a GPU, stage by stage, on a machine without network: stages run in processes of their own, each
# with its own time limit, and write a log each into the folder OUT.
#   scripts/gpu_first.sh check        versions, sweep, C++ and Python tests, the sanitizers beside them
#   scripts/gpu_first.sh time         benchmarks/cuda.py
#   scripts/gpu_first.sh profile      Nsight Compute on hot kernels
# BUILD names the build folder that has test_modules; python/posembed holds the library (README, "Tests").
set -uo pipefail
cd "$(dirname "$0")/.."
: "${OUT:=build/gpu-results}" "${BUILD:=build/gpu}" "${PYTHON:=python3}"
mkdir -p "$OUT"
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 POSEMBED_BUILD="$PWD/$BUILD"
torch=$("$PYTHON" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent)')
export LD_LIBRARY_PATH="$PWD/python/posembed/lib:$torch/lib:$(ls -d "$torch"/../nvidia/*/lib 2>/dev/null | paste -sd:):${LD_LIBRARY_PATH:-}"

# stage NAME SECONDS COMMAND...: runs it with a limit, its output in a log.
stage() {
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  timeout --signal=INT --kill-after=10 "$limit" "$@" > "$OUT/$name.log" 2>&1
  echo "$name: exit $? after $((SECONDS - began)) s"
}

versions() {
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  "$PYTHON" -c 'import torch, posembed; print(torch.__version__, posembed.build_info())'
}

check() {
  versions 2>&1 | tee "$OUT/versions.log"
  stage sweep 120 "$PYTHON" tests/gpu/sweep.py &
  stage cpp 120 "$BUILD/tests/cpp/test_modules" --gtest_filter='*Cuda*' &
  for tool in memcheck racecheck initcheck synccheck; do
    stage "$tool" "${SANITIZE_SECONDS:-150}" compute-sanitizer --tool $tool --report-api-errors no --kernel-name kns=posembed \
      --error-exitcode 9 "$PYTHON" tests/gpu/sweep.py --quick --no-poison &
  done
  stage pytest "${PYTEST_SECONDS:-200}" "$PYTHON" -m pytest tests/python -n "${WORKERS:-10}" --dist worksteal -m 'gpu and not slow' \
    -q --tb=short --timeout 90 -p no:cacheprovider --continue-on-collection-errors --maxfail 400 --durations 15
  wait
}

time_() { stage time "${TIME_SECONDS:-200}" "$PYTHON" benchmarks/cuda.py --table "$OUT/cuda.md" ${TIME_ARGS:-}; }

profile() {
  stage ncu 100 ncu --clock-control none --kernel-name-base demangled -k regex:posembed \
    --metrics dram__throughput.avg.pct_of_peak_sustained_elapsed,sm__warps_active.avg.pct_of_peak_sustained_active,smsp__issue_active.avg.pct,gpu__time_duration.sum,launch__registers_per_thread \
    --launch-count 60 --csv "$PYTHON" benchmarks/cuda.py --once
}

for one in "$@"; do
  case $one in
    check) check ;;
    time) time_ ;;
    profile) profile ;;
    *) echo "no stage $one" >&2; exit 2 ;;
  esac
done

#!/usr/bin/env bash
# posembed for aarch64, cross-compiled by GCC and run by QEMU in user mode. All of it, with Python and torch for Arm
# (5 GB), lies in build/aarch64. Needs Debian 12, g++-aarch64-linux-gnu, qemu-user and, as PYTHON, a Python 3.11 with
# requirements-dev.txt; make calls it.
#   scripts/aarch64.sh test                  C++ and Python tests, and the bits of every operator beside this machine's
#   scripts/aarch64.sh wheel [OPTIONS]       a wheel in dist/ with build_wheel.py's options, whose operators are checked
#   scripts/aarch64.sh instructions PROGRAM  instructions of kernels, beside those of this machine's kernel_instructions
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${PYTHON:-python3}")
torch=${TORCH:-2.11.0} PYTEST_ARGS=${PYTEST_ARGS:-}
folder=$PWD/build/aarch64
root=$folder/root site=$folder/site
mkdir -p "$folder"

for program in aarch64-linux-gnu-g++ qemu-aarch64; do
  if ! command -v $program > /dev/null; then
    echo "$program is missing: apt-get install g++-aarch64-linux-gnu qemu-user" >&2
    exit 1
  fi
done

# Debian's Python for Arm, unpacked. Lists and downloads have folders of their own: apt's are not touched.
make_root() {
  local apt="$folder/apt" packages
  packages=(libbz2-1.0 libc6 libcrypt1 libexpat1 libffi8 libgcc-s1 libgomp1 liblzma5 libsqlite3-0 libssl3 libstdc++6
    libpython3.11{,-dev,-minimal,-stdlib} libuuid1 python3.11{,-minimal} zlib1g)
  mkdir -p "$apt/lists/partial"
  (
    cd "$apt"
    arm=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root
      -o Dir::State::Lists="$apt/lists" -o Dir::Cache="$apt")
    apt-get "${arm[@]}" update
    apt-get "${arm[@]}" download "${packages[@]}"
    for package in *.deb; do dpkg -x "$package" "$root"; done
  )
  rm -r "$apt"
  # The compiler does not search the folder from which Debian's pyconfig.h includes this one.
  cp "$root/usr/include/aarch64-linux-gnu/python3.11/pyconfig.h" "$root/usr/include/python3.11"
  touch "$root/made"
}

# torch and what tests import, for Arm. pip takes packages of another platform only for the tags that it is told.
make_site() {
  local platforms=(--platform manylinux2014_aarch64 --platform linux_aarch64) minor
  for minor in $(seq 17 38); do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
  "$python" -m pip install --disable-pip-version-check --quiet --upgrade --target "$site" \
    --python-version 3.11 --only-binary :all: "${platforms[@]}" \
    "torch==$torch" numpy expecttest hypothesis pytest pytest-timeout safetensors
  touch "$site/made"
}

make_toolchain() {
  mkdir -p "$folder/sysconfig"
  cp "$root"/usr/lib/python3.11/_sysconfigdata__aarch64-linux-gnu.py "$folder/sysconfig"
  cat > "$folder/toolchain.cmake" << END
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_DISABLE_FIND_PACKAGE_GTest ON)
set(Python3_INCLUDE_DIR $root/usr/include/python3.11)
END
}

# Programs are linked without the libraries that torch's own libraries need.
options="-DCMAKE_TOOLCHAIN_FILE=$folder/toolchain.cmake -DPOSEMBED_CUDA=OFF"
options+=" -DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined"

# The build's Python is this machine's, which finds torch for Arm and takes itself for an Arm Python.
as_arm() {
  PYTHONPATH="$site:$folder/sysconfig" _PYTHON_HOST_PLATFORM=linux-aarch64 \
    _PYTHON_SYSCONFIGDATA_NAME=_sysconfigdata__aarch64-linux-gnu "$@"
}

emulated() { qemu-aarch64 -L "$root" "$@"; }

emulated_python() {
  emulated -E PYTHONPATH="$1:$site" -E POSEMBED_BUILD="$folder/tests" "$root/usr/bin/python3.11" "${@:2}"
}

build() {
  as_arm cmake -S . -B "$folder/tests" -G Ninja --log-level=NOTICE $options -DPOSEMBED_PYTHON="$python" \
    -DPOSEMBED_PYTHON_MODULE=ON -DPOSEMBED_TESTS=ON -DPOSEMBED_BENCHMARKS=ON -DPOSEMBED_RELOCATABLE=OFF \
    -DCMAKE_INSTALL_LIBDIR=lib -DGTEST_ROOT="${GTEST_ROOT:-/usr/src/googletest}"
  as_arm cmake --build "$folder/tests" "$@"
}

run_tests() {
  build
  rm -rf "$folder/python"
  git ls-files -z --cached --others --exclude-standard python | xargs -0 cp --parents -t "$folder"
  cmake --install "$folder/tests" --prefix "$folder/python/posembed" > "$folder/install.log"

  # The emulator ignores advice on huge pages; outputs beyond the caches take it minutes.
  local program skipped='*Cuda*:*GpuSource*:HugePages*:*StreamedOutputs*:*BeyondTheCaches*'
  for program in "$folder"/tests/tests/cpp/{test_,cuda_on_cpu/memory_}*; do
    if [ -f "$program" ] && [ -x "$program" ] && [[ $program != *_cuda_source ]]; then
      echo "== $(basename "$program")"
      emulated "$program" --gtest_brief=1 --gtest_filter="-$skipped"
    fi
  done
  PYTHONPATH=python "$python" tests/aarch64/same_bits.py record "$folder/bits.pt"
  emulated_python "$folder/python" tests/aarch64/same_bits.py compare "$folder/bits.pt"
  # Compilers take the emulator minutes, Inductor's would be one for x86-64, and a child would not be emulated.
  emulated_python "$folder/python" -m pytest -q -p no:cacheprovider -m 'not slow' \
    -k 'not compile and not export and not tracers and not caches and not large_gradient and not old_name' \
    tests/python/token/test_{token,file_table,quantized}.py tests/python/bag/test_bag.py \
    tests/python/learned/test_learned.py tests/python/sinusoidal/test_sinusoidal.py tests/python/rotary/test_rotary.py \
    tests/python/rotary_cache/test_rotary_cache.py tests/python/rotary_norm/test_rotary_norm.py \
    tests/python/alibi/test_alibi.py tests/python/input/test_input.py tests/python/test_arguments.py \
    $PYTEST_ARGS
}

make_wheel() {
  POSEMBED_BUILD="$folder/wheel${1:+-all}" CMAKE_ARGS="$options" as_arm "$python" scripts/build_wheel.py "$@"
  rm -rf "$folder/installed"
  "$python" -m zipfile -e "$(ls -t dist/posembed-*_aarch64.whl | head -1)" "$folder/installed"
  emulated_python "$folder/installed" -m posembed check
}

count_instructions() {
  build --target kernel_instructions
  "$python" benchmarks/instruction_counts.py "AVX2=qemu-x86_64 -cpu max $1" \
    "NEON=qemu-aarch64 -L $root $folder/tests/benchmarks/kernel_instructions"
}

[ -e "$root/made" ] || make_root
[ -e "$site/made" ] || make_site
make_toolchain
case "${1:-}" in
  test) run_tests ;;
  wheel) make_wheel "${@:2}" ;;
  instructions) count_instructions "${2:?a program for x86-64: make benchmark-kernels builds it}" ;;
  *) sed -n 's/^#   //p' "$0" >&2; exit 1 ;;
esac

// Tests that race_detector.h reports a kernel's races and nothing else: between threads of a block
// or, with POSEMBED_RACES_BETWEEN_BLOCKS, between blocks.
#include "race_detector.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

namespace {
int reports = 0;
}

// Hooks that the sanitizer calls.
extern "C" void __tsan_on_report(void*) { ++reports; }
extern "C" const char* __tsan_default_options() { return "exitcode=0:suppress_equal_addresses=0"; }

namespace cuda_on_cpu {
namespace {

constexpr unsigned threads = 64;

/// The number of races reported for `kernel` in `blocks` blocks.
int races(void (*kernel)(int*), unsigned blocks) {
  const int before = reports;
  cudaLaunchConfig_t config;
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  int memory[2 * threads];
  EXPECT_EQ(cudaLaunchKernelEx(&config, kernel, memory), cudaSuccess);
  return reports - before;
}

void each_its_own(int* memory) { memory[blockIdx.x * blockDim.x + threadIdx.x] = 1; }

void one_for_all(int* memory) { memory[0] = 1; }

void one_for_each_block(int* memory) {
  if (threadIdx.x == 0) memory[blockIdx.x] = 1;
}

void wait_for_nothing() {}

void wait_in_a_shuffle() { __shfl_xor_sync(~0u, 1, 1); }

template <void (*wait)()>
void one_for_all_afterwards(int* memory) {
  wait();
  if (threadIdx.x == 0) memory[0] = 1;
  wait();
}

template <void (*wait)()>
void reads_what_a_neighbour_wrote(int* memory) {
  __shared__ int values[threads];
  values[threadIdx.x] = 1;
  wait();
  memory[threadIdx.x] = values[threadIdx.x ^ 1];
}

template <void (*wait)()>
void reads_what_another_warp_wrote(int* memory) {
  __shared__ int values[threads];
  values[threadIdx.x] = 1;
  wait();
  memory[threadIdx.x] = values[threadIdx.x ^ 32];
}

template <void (*wait)()>
void writes_what_a_neighbour_read(int* memory) {
  __shared__ int values[threads];
  memory[threadIdx.x] = values[threadIdx.x ^ 1];
  wait();
  values[threadIdx.x] = 1;
}

TEST(RaceDetector, AcceptsWhatTouchesNothingInCommon) { EXPECT_EQ(races(each_its_own, 2), 0); }

TEST(RaceDetector, AcceptsLaunchesInTurn) {
  EXPECT_EQ(races(each_its_own, 1), 0);
  EXPECT_EQ(races(one_for_each_block, 2), 0);
}

TEST(RaceDetector, ReportsBlocksThatWriteTheSamePlace) {
  EXPECT_GT(races(one_for_all, 2), 0);
  EXPECT_EQ(races(one_for_all_afterwards<__syncthreads>, 2) > 0, between_blocks);
  EXPECT_EQ(races(one_for_all_afterwards<wait_in_a_shuffle>, 2) > 0, between_blocks);
}

TEST(RaceDetector, ComparesThreadsOrBlocks) {
  EXPECT_EQ(races(reads_what_a_neighbour_wrote<wait_for_nothing>, 1) > 0, !between_blocks);
  EXPECT_EQ(races(writes_what_a_neighbour_read<wait_for_nothing>, 1) > 0, !between_blocks);
}

TEST(RaceDetector, BarriersOrderMemory) {
  EXPECT_EQ(races(reads_what_a_neighbour_wrote<__syncthreads>, 1), 0);
  EXPECT_EQ(races(writes_what_a_neighbour_read<__syncthreads>, 1), 0);
}

TEST(RaceDetector, WarpsBarriersOrderTheirMemory) {
  EXPECT_EQ(races(reads_what_a_neighbour_wrote<__syncwarp>, 1), 0);
  EXPECT_EQ(races(writes_what_a_neighbour_read<__syncwarp>, 1), 0);
  EXPECT_EQ(races(reads_what_another_warp_wrote<__syncwarp>, 1) > 0, !between_blocks);
}

TEST(RaceDetector, ShufflesDoNot) {
  EXPECT_EQ(races(reads_what_a_neighbour_wrote<wait_in_a_shuffle>, 1) > 0, !between_blocks);
}

}  // namespace
}  // namespace cuda_on_cpu

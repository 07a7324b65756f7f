// The main function of every program that measures a kernel.
#include <benchmark/benchmark.h>

#include "core/instruction_set.h"
#include "kernels/cases.h"

int main(int argc, char** argv) {
  posembed::benchmarks::register_cases();
  benchmark::Initialize(&argc, argv);
  benchmark::AddCustomContext("instruction_set",
                              posembed::core::name(posembed::core::instruction_set()));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

// Functions that a program of kernel measurements defines; kernels/main.cpp is the rest of it.
#pragma once

namespace posembed::benchmarks {

/// Registers the program's cases with Google Benchmark.
void register_cases();

}  // namespace posembed::benchmarks

// The limits as plain functions, for benchmarks of whole calls, which are written in Python.
#include "kernels/bandwidth_limits.h"

namespace posembed::benchmarks {
namespace {

const std::vector<NamedCopy>& all_copies() {
  static const std::vector<NamedCopy> all = copies();
  return all;
}

const std::vector<NamedUpdate>& all_updates() {
  static const std::vector<NamedUpdate> all = updates();
  return all;
}

const std::vector<NamedFill>& all_fills() {
  static const std::vector<NamedFill> all = fills();
  return all;
}

}  // namespace

extern "C" {
size_t posembed_copies() { return all_copies().size(); }
size_t posembed_updates() { return all_updates().size(); }
size_t posembed_fills() { return all_fills().size(); }
void posembed_copy(size_t which, const void* in, void* out, size_t bytes) {
  all_copies()[which].run(in, out, bytes);
}
void posembed_update(size_t which, void* data, size_t bytes) {
  all_updates()[which].run(data, bytes);
}
void posembed_fill(size_t which, void* data, size_t bytes) { all_fills()[which].run(data, bytes); }
}

}  // namespace posembed::benchmarks

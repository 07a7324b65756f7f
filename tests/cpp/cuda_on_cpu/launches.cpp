// The number of launches, for tests of libposembed.so.
#include "launches.h"

extern "C" [[gnu::visibility("default")]] int64_t posembed_launches() {
  return cuda_on_cpu::launches;
}

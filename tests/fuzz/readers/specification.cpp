// Fuzzes JSON of rotary specifications: whatever is accepted must survive a round trip.
#include <c10/util/Logging.h>

#include <string>

#include "budget.h"
#include "mutator.h"
#include "posembed/rotary_specification.h"

using namespace posembed;

namespace {

void check(const RotarySpec& spec) { fuzz::require(RotarySpec::from_json(spec.to_json()) == spec); }

/// Calls `read`. Errors that blame the caller are valid answers; other exceptions are not.
template <typename Read>
void answer(const Read& read) {
  try {
    check(read());
  } catch (const c10::ValueError&) {
  } catch (const c10::TypeError&) {
  }
}

}  // namespace

/// Errors are most of the answers here, and finding where each was raised takes most of the time.
extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  c10::SetStackTraceFetcher([] { return std::string(); });
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const fuzz::Budget budget(size);
  const std::string text(fuzz::text_of(data, size));
  answer([&] { return RotarySpec::from_json(text); });
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  return fuzz::mutate(data, size, max_size, seed);
}

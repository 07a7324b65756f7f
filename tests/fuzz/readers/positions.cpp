// Fuzzes positions.json: every layer of a document that is accepted has a sound specification.
#include <c10/util/Logging.h>

#include <set>
#include <string>

#include "budget.h"
#include "mutator.h"
#include "posembed/model_positions.h"

using namespace posembed;

namespace {

void check(const ModelPositions& model) {
  std::set<std::string> seen;
  for (const LayerPositions& layer : model.layers()) {
    if (!layer.rotary.has_value() || !seen.insert(layer.rotary->to_json()).second) continue;
    fuzz::require(RotarySpec::from_json(layer.rotary->to_json()) == *layer.rotary);
  }
  for (const std::string& name : model.parts()) model.part(name);
  model.rotary();
}

}  // namespace

/// Errors are most of the answers here, and finding where each was raised takes most of the time.
extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  c10::SetStackTraceFetcher([] { return std::string(); });
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const fuzz::Budget budget(size);
  try {
    check(ModelPositions::from_json(std::string(fuzz::text_of(data, size))));
  } catch (const c10::ValueError&) {
  }
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  return fuzz::mutate(data, size, max_size, seed);
}

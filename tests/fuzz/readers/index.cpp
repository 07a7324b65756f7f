// Fuzzes the index of sharded safetensors: no name of a file may lead to another folder.
#include "answer.h"
#include "budget.h"
#include "mutator.h"
#include "pretrained/file.h"

using namespace posembed;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const fuzz::Budget budget(size);
  fuzz::answer(size, [&] {
    for (const pretrained::ShardEntry& entry : pretrained::read_index(fuzz::text_of(data, size))) {
      fuzz::require(!entry.file.empty() && entry.file.find('/') == std::string::npos);
    }
  });
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  return fuzz::mutate(data, size, max_size, seed);
}

// A reader's answer to a file: the data that it reads, or an error at an offset in the file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mutator.h"
#include "pretrained/file.h"

namespace posembed::fuzz {

/// Calls `read` for a file of `size` bytes; any other exception ends the fuzzer.
template <typename Read>
void answer(size_t size, const Read& read) {
  try {
    read();
  } catch (const pretrained::BadFile& error) {
    require(error.offset >= 0 && error.offset <= static_cast<int64_t>(size));
  }
}

}  // namespace posembed::fuzz

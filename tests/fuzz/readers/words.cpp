// Fuzzes files of words: word2vec binary and text, fastText .vec and GloVe, which one reader tells
// apart. Reads rows as the library does, with and without requiring UTF-8, and continues after rows
// that cannot be read.
#include <cmath>
#include <vector>

#include "answer.h"
#include "budget.h"
#include "mutator.h"
#include "pretrained/file.h"

using namespace posembed;

namespace {

/// Reads all rows; a row that cannot be read ends the reading, or is left out.
void read(std::string_view file, bool is_strict, core::Scalar scalar) {
  const auto size = static_cast<int64_t>(file.size());
  const pretrained::WordLayout layout = pretrained::detect_layout(file.substr(0, pretrained::layout_bytes), size);
  // The header's numbers must fit the file before memory is allocated for them.
  fuzz::require(layout.rows <= size && layout.dim <= pretrained::max_line);
  int64_t loaded = 0;
  pretrained::RowReader rows(file, layout, is_strict, [&](int64_t end) {
    fuzz::require(end > loaded && end <= size);
    loaded = end;
  });
  std::vector<double> numbers;
  for (pretrained::Row row;;) {
    try {
      if (!rows.next(row)) return;
      fuzz::require(pretrained::utf8_prefix(row.word) == row.word.size() && !row.word.empty());
      fuzz::require(rows.position() <= loaded);
      numbers.resize(static_cast<size_t>(layout.dim));
      rows.decode(row, scalar, numbers.data());
    } catch (const pretrained::BadRow&) {
      fuzz::require(rows.first_word().size() <= 40);
      if (is_strict) throw;
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const fuzz::Budget budget(size);
  for (const bool is_strict : {true, false}) {
    const core::Scalar scalar = is_strict ? core::Scalar::float32 : core::Scalar::float64;
    fuzz::answer(size, [&] { read(fuzz::text_of(data, size), is_strict, scalar); });
  }
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  return fuzz::mutate(data, size, max_size, seed);
}

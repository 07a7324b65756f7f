// Files of model2vec, whose rows are not those of token ids: a mapping shares rows between tokens,
// and tokens have weights.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "posembed/export.h"
#include "posembed/pretrained.h"

namespace posembed::pretrained {

/// The rows of a model2vec file by token id, table[mapping] * weights; std::nullopt for other
/// files, and for tables of another name than that of the options.
/// @param by_word  whether rows are wanted by words, which name rows of the table
/// @throws c10::ValueError  by_word, and tokens have weights; or mapping or weights do not fit
POSEMBED_API std::optional<torch::Tensor> token_rows(const VectorFile& file,
                                                     const ReadOptions& options, bool by_word);

/// The table that from_file() of modules reads: the rows of token ids or words, or all. Warns of
/// rows that were left out.
torch::Tensor table_from_file(const std::string& path,
                              const std::optional<std::vector<std::string>>& vocabulary,
                              const ReadOptions& read, const OpenOptions& open);

}  // namespace posembed::pretrained

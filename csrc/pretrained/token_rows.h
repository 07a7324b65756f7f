// Files of model2vec, whose rows are not those of token ids: a mapping shares rows between tokens,
// and tokens have weights.
#pragma once

#include <optional>

#include "posembed/export.h"
#include "posembed/pretrained.h"

namespace posembed::pretrained {

/// The rows of a model2vec file by token id, table[mapping] * weights; std::nullopt for other
/// files, and for tables of another name than that of the options.
/// @param by_word  whether rows are wanted by words, which name rows of the table
/// @throws c10::ValueError  by_word, and tokens have weights; or mapping or weights do not fit
POSEMBED_API std::optional<torch::Tensor> token_rows(const VectorFile& file,
                                                     const ReadOptions& options, bool by_word);

}  // namespace posembed::pretrained

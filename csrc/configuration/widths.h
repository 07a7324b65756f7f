// Widths: components of a head, and how many of them are rotated.
#pragma once

#include <string>

#include "configuration/keys.h"

namespace posembed::configuration {

/// Components of one head: as given, or the model's width divided by the number of heads.
int64_t head_width(Keys& config);

/// Components of a head of latent attention whose configuration names rotated components but
/// rotates none.
int64_t latent_width(Keys& config);

struct Widths {
  int64_t head_dim;
  int64_t rotary_dim;  // may be odd
};
/// Throws c10::ValueError for more components than a kernel rotates.
void check_rotated(int64_t rotary_dim);

/// @param rules  the catalogue's entry
Widths widths_of(Keys& config, Keys& rope, const json& rules);

}  // namespace posembed::configuration

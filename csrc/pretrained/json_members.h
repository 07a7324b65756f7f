// Visits the members of a JSON object one by one, each with its offset in the file.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace posembed::pretrained {

/// A function of a member's name, its value, and the byte where its name ends.
using Member = std::function<void(const std::string&, const nlohmann::json&, int64_t)>;

/// Calls `member` for each member of the object `text` and keeps none of them, so that memory does
/// not grow with their number. `begin` is the offset of `text` in its file. Throws BadFile if
/// `text` is not JSON or not an object, or if an object on any level repeats a name.
void visit_members(std::string_view text, int64_t begin, const Member& member);

}  // namespace posembed::pretrained

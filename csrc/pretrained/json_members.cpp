#include "pretrained/json_members.h"

#include <iterator>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <vector>

#include "pretrained/bad_file.h"

namespace posembed::pretrained {
namespace {

using nlohmann::json;

/// The deepest nesting accepted, more than any real header has. Limits memory.
constexpr int max_depth = 16;

/// The most values in a list, more than any real shape has dimensions.
constexpr int max_listed = 1024;

/// Counts the bytes that the parser reads, because the parser reports offsets only in its own
/// errors.
class Cursor {
 public:
  using iterator_category = std::forward_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  Cursor(const char* at, const char** furthest) : at_(at), furthest_(furthest) {}
  reference operator*() const { return *at_; }
  Cursor& operator++() {
    *furthest_ = ++at_;
    return *this;
  }
  Cursor operator++(int) {
    const Cursor before = *this;
    ++*this;
    return before;
  }
  bool operator==(const Cursor& other) const { return at_ == other.at_; }
  bool operator!=(const Cursor& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  const char** furthest_;
};

/// Handles the parser's events and passes on complete members of the outermost object.
class Walk {
 public:
  Walk(const Member& member, const std::function<int64_t()>& byte_offset)
      : member_(member), byte_offset_(byte_offset) {}

  /// Returns whether the parser keeps the value.
  bool operator()(int depth, json::parse_event_t event, const json& parsed) {
    using Event = json::parse_event_t;
    if (depth == 0 && event != Event::object_start && event != Event::object_end) {
      fail(byte_offset_(), "expected a JSON object");
    }
    if (depth > max_depth)
      fail(byte_offset_(), "JSON is nested deeper than ", max_depth, " levels");
    listed_ = event == Event::key ? 0 : listed_ + 1;
    if (listed_ > max_listed)
      fail(byte_offset_(), "expected at most ", max_listed, " values in a list");
    if (event == Event::object_start) names_.emplace_back();
    if (event == Event::object_end) names_.pop_back();
    if (event == Event::key) take_name(depth, parsed.get_ref<const std::string&>());
    const bool is_value =
        event == Event::object_end || event == Event::array_end || event == Event::value;
    if (depth != 1 || !is_value) return true;
    member_(name_, parsed, name_end_);
    return false;
  }

 private:
  void take_name(int depth, const std::string& name) {
    if (!names_.back().insert(name).second)
      fail(byte_offset_(), "name '", name, "' is given twice");
    if (depth != 1) return;
    name_ = name;
    name_end_ = byte_offset_();
  }

  const Member& member_;
  const std::function<int64_t()>& byte_offset_;
  std::vector<std::unordered_set<std::string>> names_;  // of the open objects
  std::string name_;
  int64_t name_end_ = 0;
  int listed_ = 0;  // events since the last name
};

/// The library's message without its "[json.exception...]".
std::string reason_of(const json::exception& error) {
  const std::string text = error.what();
  const size_t end = text.find("] ");
  return end == std::string::npos ? text : text.substr(end + 2);
}

}  // namespace

void visit_members(std::string_view text, int64_t begin, const Member& member) {
  // The parser treats a zero byte as the end.
  const size_t zero = text.find('\0');
  if (zero != std::string_view::npos) {
    fail(begin + static_cast<int64_t>(zero), "expected JSON: a zero byte");
  }
  const char* furthest = text.data();
  const std::function<int64_t()> byte_offset = [&] { return begin + (furthest - text.data()); };
  Walk walk(member, byte_offset);
  const auto events = [&](int depth, json::parse_event_t event, json& parsed) {
    return walk(depth, event, parsed);
  };
  try {
    const char* end = text.data() + text.size();
    const json kept = json::parse(Cursor(text.data(), &furthest), Cursor(end, &furthest), events);
    if (!kept.is_object()) fail(begin, "expected a JSON object");
  } catch (const json::parse_error& error) {
    fail(begin + static_cast<int64_t>(error.byte) - 1, "expected JSON: ", reason_of(error));
  } catch (const json::exception& error) {  // for example a number beyond double
    fail(byte_offset(), "expected JSON: ", reason_of(error));
  }
}

}  // namespace posembed::pretrained

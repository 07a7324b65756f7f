#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "pretrained/file.h"

namespace posembed::pretrained {

// ------------------------------------------------------------------------------------ json members
// Visits the members of a JSON object one by one, each with its offset in the file.

/// A function of a member's name, its value, and the byte where its name ends.
using Member = std::function<void(const std::string&, const nlohmann::json&, int64_t)>;

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

/// Calls `member` for each member of the object `text` and keeps none of them, so that memory does
/// not grow with their number. `begin` is the offset of `text` in its file. Throws BadFile if
/// `text` is not JSON or not an object, or if an object on any level repeats a name.
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

// ------------------------------------------------------------------------------------- safetensors

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors are little-endian");

namespace posembed::pretrained {
namespace {

constexpr int64_t length_bytes = 8;

struct Dtype {
  const char* name;
  int64_t bits;
};
constexpr Dtype dtypes[] = {
    {"F32", 32},    {"F16", 16},    {"BF16", 16},       {"F64", 64},        {"I64", 64},
    {"I32", 32},    {"I16", 16},    {"I8", 8},          {"U8", 8},          {"BOOL", 8},
    {"U16", 16},    {"U32", 32},    {"U64", 64},        {"F8_E4M3", 8},     {"F8_E5M2", 8},
    {"F8_E8M0", 8}, {"C64", 64},    {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F4", 4},
    {"F6_E2M3", 6}, {"F6_E3M2", 6},
};

int64_t bits_of(const TensorEntry& entry) {
  for (const Dtype& dtype : dtypes) {
    if (entry.dtype == dtype.name) return dtype.bits;
  }
  fail(entry.byte_offset, "tensor '", entry.name, "': unknown dtype '", entry.dtype, "'");
}

uint64_t header_length(std::string_view head) {
  uint64_t length = 0;
  std::memcpy(&length, head.data(), sizeof length);
  return length;
}

/// A value for a message.
std::string brief(const json& value) { return core::brief(value.dump(), 60); }

/// Reads an unsigned integer that fits into 63 bits.
int64_t count(const json& number, const TensorEntry& entry, const char* what) {
  const bool fits = number.is_number_unsigned() &&
                    number.get<uint64_t>() <= uint64_t{std::numeric_limits<int64_t>::max()};
  if (!fits) {
    fail(entry.byte_offset, "tensor '", entry.name, "': ", what,
         ": expected whole numbers below 2^63, got ", brief(number));
  }
  return number.get<int64_t>();
}

const json& field(const json& object, const char* key, json::value_t type,
                  const TensorEntry& entry) {
  const auto found = object.find(key);
  if (found == object.end()) fail(entry.byte_offset, "tensor '", entry.name, "' has no ", key);
  if (found->type() != type) {
    fail(entry.byte_offset, "tensor '", entry.name, "': ", key, ": expected ",
         json(type).type_name(), ", got ", brief(*found));
  }
  return *found;
}

int64_t multiply(int64_t left, int64_t right, const TensorEntry& entry) {
  int64_t product = 0;
  if (__builtin_mul_overflow(left, right, &product)) {
    fail(entry.byte_offset, "tensor '", entry.name, "': its shape's size overflows 64 bits");
  }
  return product;
}

/// The bytes that dtype and shape need. Checks for overflow even if a dimension is 0, which torch
/// skips when it multiplies strides.
int64_t expected_size(const TensorEntry& entry) {
  int64_t bits = bits_of(entry);
  for (const int64_t extent : entry.shape) {
    bits = multiply(bits, std::max<int64_t>(1, extent), entry);
  }
  if (std::count(entry.shape.begin(), entry.shape.end(), 0) > 0) return 0;
  if (bits % 8 != 0) {
    fail(entry.byte_offset, "tensor '", entry.name, "': ", bits, " bits are not whole bytes");
  }
  return bits / 8;
}

TensorEntry read_entry(const std::string& name, const json& value, int64_t byte_offset,
                       int64_t data_begin, int64_t data_size) {
  TensorEntry entry{name, {}, {}, 0, 0, byte_offset};
  if (!value.is_object()) fail(byte_offset, "tensor '", name, "': expected an object");
  entry.dtype = field(value, "dtype", json::value_t::string, entry).get<std::string>();
  for (const json& extent : field(value, "shape", json::value_t::array, entry)) {
    entry.shape.push_back(count(extent, entry, "shape"));
  }
  const json& offsets = field(value, "data_offsets", json::value_t::array, entry);
  if (offsets.size() != 2)
    fail(byte_offset, "tensor '", name, "': data_offsets: expected two numbers");
  const int64_t begin = count(offsets[0], entry, "data_offsets");
  const int64_t end = count(offsets[1], entry, "data_offsets");
  if (begin > end || end > data_size) {
    fail(byte_offset, "tensor '", name, "': data_offsets ", begin, " to ", end,
         ": expected a range of the ", data_size, " bytes that follow the header");
  }
  entry.begin = data_begin + begin;
  entry.size = end - begin;
  if (const int64_t expected = expected_size(entry); expected != entry.size) {
    fail(byte_offset, "tensor '", name, "': dtype and shape need ", expected,
         " bytes, data_offsets give ", entry.size);
  }
  return entry;
}

/// Checks that metadata contains only strings, as the format requires.
void check_metadata(const json& value, int64_t byte_offset) {
  const auto is_text = [](const json& each) { return each.is_string(); };
  const bool known =
      value.is_null() || (value.is_object() && std::all_of(value.begin(), value.end(), is_text));
  if (!known) fail(byte_offset, "__metadata__: expected names and texts, got ", brief(value));
}

/// Checks that tensors are contiguous from the end of the header to the end of the file.
void check_without_holes(const std::vector<TensorEntry>& entries, int64_t begin, int64_t end) {
  std::vector<const TensorEntry*> sorted;
  for (const TensorEntry& entry : entries) sorted.push_back(&entry);
  const auto before = [](const TensorEntry* a, const TensorEntry* b) {
    return std::pair(a->begin, a->size) < std::pair(b->begin, b->size);
  };
  std::sort(sorted.begin(), sorted.end(), before);
  for (const TensorEntry* entry : sorted) {
    if (entry->begin != begin) {
      fail(entry->byte_offset, "tensor '", entry->name, "' begins at byte ", entry->begin,
           entry->begin < begin ? ", inside another tensor" : ", after a hole", "; expected ",
           begin);
    }
    begin += entry->size;
  }
  if (begin != end) fail(begin, end - begin, " bytes after the last tensor");
}

/// Whether a text can be the name of a shard. Shards are in the folder of their index, so names
/// must not lead to other folders.
bool is_file_name(const std::string& text) {
  constexpr size_t longest = 255;  // of file systems
  constexpr std::string_view separators("/\0", 2);
  return !text.empty() && text.size() <= longest && text != "." && text != ".." &&
         text.find_first_of(separators) == std::string::npos;
}

}  // namespace

bool is_safetensors(std::string_view head, int64_t size) {
  return head.size() > length_bytes &&
         header_length(head) <= static_cast<uint64_t>(size - length_bytes) &&
         head[length_bytes] == '{';
}

int64_t header_end(std::string_view head, int64_t size) {
  if (!is_safetensors(head, size)) refuse_foreign(head);
  if (size < length_bytes) fail(0, "expected a header's length in 8 bytes, the file has ", size);
  // In broken files, the length is the most frequent fault.
  const uint64_t length = header_length(head);
  if (length > max_header) {
    fail(0, "header of ", length, " bytes; at most ", max_header, " are allowed");
  }
  const int64_t end = length_bytes + static_cast<int64_t>(length);
  if (end > size) {
    fail(0, "header of ", length, " bytes, but only ", size - length_bytes,
         " follow: the file is cut off, or no safetensors file");
  }
  return end;
}

std::vector<TensorEntry> read_header(std::string_view head, int64_t size) {
  const std::string_view text = head.substr(length_bytes);
  const auto data_begin = static_cast<int64_t>(head.size());
  if (text.empty() || text[0] != '{') fail(length_bytes, "expected a header that begins with '{'");
  std::vector<TensorEntry> entries;
  visit_members(
      text, length_bytes, [&](const std::string& name, const json& value, int64_t byte_offset) {
        if (name == "__metadata__") return check_metadata(value, byte_offset);
        entries.push_back(read_entry(name, value, byte_offset, data_begin, size - data_begin));
      });
  check_without_holes(entries, data_begin, size);
  return entries;
}

std::string read_metadata(std::string_view head, const std::string& name) {
  std::string found;
  visit_members(head.substr(length_bytes), length_bytes,
                [&](const std::string& member, const json& value, int64_t byte_offset) {
                  if (member != "__metadata__") return;
                  check_metadata(value, byte_offset);
                  if (value.contains(name)) found = value.at(name).get<std::string>();
                });
  return found;
}

std::vector<ShardEntry> read_index(std::string_view file) {
  refuse_foreign(file);
  std::vector<ShardEntry> entries;
  bool found = false;
  visit_members(file, 0, [&](const std::string& name, const json& value, int64_t byte_offset) {
    if (name != "weight_map") return;
    found = true;
    if (!value.is_object()) fail(byte_offset, "weight_map: expected an object");
    for (const auto& [tensor, shard] : value.items()) {
      if (!shard.is_string() || !is_file_name(shard.get_ref<const std::string&>())) {
        fail(byte_offset, "tensor '", tensor, "': expected the name of a file, got ", brief(shard));
      }
      entries.push_back({tensor, shard.get<std::string>(), byte_offset});
    }
  });
  if (!found) fail(0, "expected a member weight_map: names of tensors and their files");
  return entries;
}

}  // namespace posembed::pretrained

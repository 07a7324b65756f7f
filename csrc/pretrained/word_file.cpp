#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "pretrained/file.h"

#if !defined(__cpp_lib_to_chars)
#error "posembed needs std::from_chars for floating-point numbers: GCC 11 or newer"
#endif

namespace posembed::pretrained {
namespace {

/// Bytes that are loaded at a time.
constexpr int64_t part_bytes = 1 << 22;
constexpr std::string_view separators = " \t";

bool is_separator(char c) { return (c == ' ') | (c == '\t'); }  // no branch, to vectorise

std::string_view trim_right(std::string_view text) {
  const size_t last = text.find_last_not_of(" \t\r");
  return text.substr(0, last == std::string_view::npos ? 0 : last + 1);
}

std::string_view line_at(std::string_view file, int64_t begin) {
  const std::string_view rest = file.substr(static_cast<size_t>(begin));
  return rest.substr(0, rest.find('\n'));
}

/// The number of separators in a line, counted in 8 bits so that a vector counts 16 characters or
/// more at once.
int64_t count_separators(std::string_view line) {
  constexpr size_t block = 128;
  int64_t total = 0;
  for (size_t begin = 0; begin < line.size(); begin += block) {
    uint8_t sum = 0;
    for (const char c : line.substr(begin, block)) sum += static_cast<uint8_t>(is_separator(c));
    total += sum;
  }
  return total;
}

/// A line's parts, as views.
std::vector<std::string_view> split(std::string_view line) {
  std::vector<std::string_view> parts;
  size_t begin = line.find_first_not_of(separators);
  while (begin != std::string_view::npos) {
    const size_t end = std::min(line.find_first_of(separators, begin), line.size());
    parts.push_back(line.substr(begin, end - begin));
    begin = line.find_first_not_of(separators, end);
  }
  return parts;
}

template <typename Number>
std::from_chars_result parse_number(std::string_view text, Number& number) {
  // from_chars does not accept a plus sign, which some programs write.
  const size_t sign = text.size() > 1 && text[0] == '+' && text[1] != '-' ? 1 : 0;
  return std::from_chars(text.data() + sign, text.data() + text.size(), number);
}

/// Parses a whole text as a number; the largest number if it is larger, std::nullopt if it is not a
/// number.
template <typename Number>
std::optional<Number> number_in(std::string_view text) {
  Number number{};
  const std::from_chars_result result = parse_number(text, number);
  if (result.ec == std::errc::result_out_of_range) number = std::numeric_limits<Number>::max();
  const bool is_number =
      result.ptr == text.data() + text.size() && result.ec != std::errc::invalid_argument;
  return is_number && !text.empty() ? std::optional<Number>(number) : std::nullopt;
}

bool is_number(std::string_view text) { return number_in<double>(text).has_value(); }

/// Whether a text is a number in digits. Words that contain spaces do not end in such a number.
bool is_component(std::string_view text) {
  return text.find_first_of("0123456789") != std::string_view::npos && is_number(text);
}

/// Whether an out-of-range number is too near 0, rather than too large.
bool is_tiny(std::string_view number) {
  const size_t mark = std::min(number.find_first_of("eE"), number.size());
  const std::string_view digits = number.substr(0, mark);
  const size_t point = std::min(digits.find('.'), digits.size());
  const size_t first = std::min(digits.find_first_of("123456789"), digits.size());
  // Positive if the first significant digit is before the point.
  const auto magnitude = static_cast<int64_t>(point) - static_cast<int64_t>(first);
  int64_t exponent = 0;
  const std::string_view rest = number.substr(std::min(mark + 1, number.size()));
  if (parse_number(rest, exponent).ec == std::errc::result_out_of_range) return rest[0] == '-';
  return exponent < -magnitude;
}

/// Rounds a number that from_chars reports as out of range: to 0, a number near 0, or infinity.
template <typename Number>
Number number_out_of_range(std::string_view text) {
  long double wide = 0;
  if (parse_number(text, wide).ec == std::errc::result_out_of_range) {
    wide = is_tiny(text) ? 0.0L : HUGE_VALL;
    if (text[0] == '-') wide = -wide;
  }
  return static_cast<Number>(wide);
}

// ------------------------------------------------------------------------------------------ layout

/// The byte order mark. Some editors write it; it is not part of the first word.
constexpr std::string_view byte_order_mark = "\xef\xbb\xbf";

/// The offset of the text after a byte order mark.
int64_t text_begin(std::string_view file) {
  const bool marked = file.substr(0, byte_order_mark.size()) == byte_order_mark;
  return marked ? static_cast<int64_t>(byte_order_mark.size()) : 0;
}

/// Reads a header such as "400000 300\n": the number of rows, and of numbers in a row.
std::optional<WordLayout> read_word_header(std::string_view file, int64_t size) {
  const int64_t begin = text_begin(file);
  // Two numbers and a newline fit in this.
  const std::string_view head = file.substr(static_cast<size_t>(begin), 64);
  const std::string_view line = line_at(head, 0);
  const std::vector<std::string_view> parts = split(trim_right(line));
  const bool is_cut = begin + static_cast<int64_t>(line.size()) == size;
  if (parts.size() != 2 || (line.size() == head.size() && !is_cut)) return std::nullopt;
  const auto rows = number_in<int64_t>(parts[0]), dim = number_in<int64_t>(parts[1]);
  if (!rows.has_value() || !dim.has_value()) return std::nullopt;
  if (is_cut) fail(size, "the file ends inside its header");
  WordLayout layout;
  layout.rows = *rows;
  layout.dim = *dim;
  layout.begin = begin + static_cast<int64_t>(line.size()) + 1;
  return layout;
}

/// Whether bytes may be text: UTF-8 without control characters. Up to `cut` bytes at the end may be
/// an incomplete character.
bool is_text(std::string_view bytes, size_t cut = 0) {
  const auto is_control = [](char c) {
    return static_cast<uint8_t>(c) < ' ' && c != '\t' && c != '\r' && c != '\n';
  };
  return utf8_prefix(bytes) + cut >= bytes.size() &&
         std::none_of(bytes.begin(), bytes.end(), is_control);
}

/// The part of a line after its first TAB; empty without one.
std::string_view after_tab(std::string_view line) {
  const size_t tab = line.find('\t');
  return tab == std::string_view::npos ? std::string_view() : line.substr(tab + 1);
}

/// Whether a row's first TAB separates its word from `dim` numbers.
bool is_tabbed(std::string_view row, int64_t dim) {
  const std::vector<std::string_view> numbers = split(after_tab(row));
  return static_cast<int64_t>(numbers.size()) == dim &&
         std::all_of(numbers.begin(), numbers.end(), is_number);
}

/// Whether rows are binary float32, judged by the first row. A line with enough numbers is text.
/// Otherwise, the bytes that would be binary numbers decide, so that a broken line of text is
/// reported as broken text.
bool is_binary(std::string_view file, const WordLayout& layout) {
  const size_t begin = file.find_first_not_of("\r\n", static_cast<size_t>(layout.begin));
  if (layout.rows == 0 || begin == std::string_view::npos) return false;
  const std::string_view row = file.substr(begin, max_line);
  const std::string_view line = trim_right(line_at(row, 0));
  const std::vector<std::string_view> parts = split(line);
  const auto dim = static_cast<size_t>(std::max<int64_t>(1, layout.dim));
  const bool is_wide = parts.size() > dim;
  if (is_wide && std::all_of(parts.end() - static_cast<int64_t>(dim), parts.end(), is_number)) {
    return false;
  }
  const size_t word_end = std::min(line.find_first_of(separators), line.size());
  if (is_wide && dim > 1 && is_text(line.substr(word_end))) return false;
  const size_t numbers = std::min(row.find(' '), row.size());
  return parts.size() < 2 || !is_number(parts.back()) ||
         !is_text(row.substr(numbers, std::min(dim, row.size()) * sizeof(float)), 3);
}

/// Throws if the header promises more data than the file has, before memory is allocated for it.
void check_promise(int64_t size, const WordLayout& layout) {
  const bool sane = layout.rows >= 0 && layout.dim > 0 && layout.dim <= max_line;
  const uint64_t held = static_cast<uint64_t>(size) + 1;  // the last newline may be missing
  const uint64_t per_number = layout.binary ? sizeof(float) : 2;
  // The minimum size of a row. Text: a word of one byte, numbers of one digit with a separator
  // each, the newline. Binary: a word of one byte, a space, the numbers.
  const bool fits = sane && (layout.rows == 0 ||
                             (static_cast<uint64_t>(layout.dim) <= held &&
                              static_cast<uint64_t>(layout.rows) <=
                                  held / (static_cast<uint64_t>(layout.dim) * per_number + 2)));
  if (!fits) {
    fail(0, "the header says ", layout.rows, " rows of ", layout.dim, " numbers, the file has ",
         size, " bytes");
  }
}

/// Throws for a word of several parts with CR between them: a file whose lines end in CR alone
/// would be one row.
template <typename Error>
void check_line_ends(std::string_view line, int64_t begin,
                     const std::vector<std::string_view>& parts, size_t words) {
  const size_t end = static_cast<size_t>(parts[words - 1].end() - line.begin());
  const size_t mark = line.substr(0, end).find('\r');
  if (mark == std::string_view::npos) return;
  fail<Error>(begin + static_cast<int64_t>(mark),
              "expected lines that end in LF or CR LF, got CR alone: replace it, as with ",
              "tr '\\r' '\\n'");
}

/// The width of a row without a header (GloVe): the numbers at the end of the first line.
WordLayout read_first_row(std::string_view file) {
  WordLayout layout;
  layout.begin = text_begin(file);
  const std::string_view line = trim_right(line_at(file.substr(0, max_line), layout.begin));
  const auto behind_tab = static_cast<int64_t>(split(after_tab(line)).size());
  if (behind_tab > 0 && is_tabbed(line, behind_tab)) {
    layout.dim = behind_tab;
    layout.tabbed = true;
    return layout;
  }
  const std::vector<std::string_view> parts = split(line);
  while (layout.dim + 1 < static_cast<int64_t>(parts.size()) &&
         is_number(parts[parts.size() - 1 - static_cast<size_t>(layout.dim)])) {
    ++layout.dim;
  }
  const size_t words = parts.size() - static_cast<size_t>(layout.dim);
  if (words > 1) check_line_ends<BadFile>(line, layout.begin, parts, words);
  if (layout.dim == 0) {
    fail(0, "neither safetensors, word2vec, fastText nor GloVe: the first line is no word ",
         "with numbers");
  }
  return layout;
}

}  // namespace

WordLayout detect_layout(std::string_view head, int64_t size) {
  refuse_foreign(head);
  std::optional<WordLayout> layout = read_word_header(head, size);
  if (!layout.has_value()) return read_first_row(head);
  layout->binary = is_binary(head, *layout);
  check_promise(size, *layout);
  const std::string_view first = trim_right(line_at(head, layout->begin));
  layout->tabbed = !layout->binary && is_tabbed(first, layout->dim);
  return *layout;
}

// -------------------------------------------------------------------------------------------- rows

void RowReader::load_to(int64_t end) {
  if (end <= loaded_) return;
  const auto size = static_cast<int64_t>(file_.size());
  loaded_ = std::min(size, std::max(end, loaded_ + part_bytes));
  load_(loaded_);
}

template <typename Search>
size_t RowReader::find(int64_t begin, const Search& search) {
  const auto size = static_cast<int64_t>(file_.size());
  int64_t from = begin;
  size_t end = std::string_view::npos;
  while (end == std::string_view::npos && from < size) {
    load_to(from + 1);
    end = search(loaded(), static_cast<size_t>(from));
    from = loaded_;
    if (static_cast<int64_t>(std::min(end, loaded().size())) - begin > max_line) {
      fail(begin, "more than ", max_line, " bytes without the end of a word or a line");
    }
  }
  return end;
}

bool RowReader::at_end() {
  const size_t next = find(at_, [](std::string_view text, size_t from) {
    return text.find_first_not_of(" \t\r\n", from);
  });
  const bool ended = next == std::string_view::npos;
  if (layout_.rows < 0 || (ended && rows_read_ == layout_.rows)) return ended;
  if (ended) {
    fail(static_cast<int64_t>(file_.size()), "the file ends after ", rows_read_,
         " rows, its header says ", layout_.rows);
  }
  if (rows_read_ == layout_.rows) {
    fail(at_, "more follows the ", layout_.rows, " rows of the header");
  }
  return false;
}

bool RowReader::next(Row& row) {
  // The rest of the file matters only after the last row or at a blank line.
  const size_t at = static_cast<size_t>(at_);
  load_to(std::min(at_ + 1, static_cast<int64_t>(file_.size())));
  const bool due =
      rows_read_ == layout_.rows || at >= file_.size() || static_cast<uint8_t>(file_[at]) <= ' ';
  if (due && at_end()) return false;
  begin_ = at_;
  layout_.binary ? next_binary(row) : next_text(row);
  row.number = rows_read_;
  const size_t valid = utf8_prefix(row.word);
  if (valid != row.word.size()) {
    if (check_utf8_) {
      fail<BadRow>(offset(row.word) + static_cast<int64_t>(valid), "a word that is not UTF-8");
    }
    row.word = replaced_ = utf8_replaced(row.word);
  }
  return true;
}

std::string_view RowReader::first_word() const {
  constexpr size_t longest = 40;
  const std::string_view head = loaded().substr(static_cast<size_t>(begin_), longest);
  const std::string_view end = layout_.tabbed ? "\t\r\n" : " \t\r\n";
  return head.substr(0, head.find_first_of(end));
}

void RowReader::next_binary(Row& row) {
  // Some programs end a row with a newline, others do not.
  const size_t begin = find(
      at_, [](std::string_view text, size_t from) { return text.find_first_not_of('\n', from); });
  const size_t space =
      begin == std::string_view::npos
          ? begin
          : find(static_cast<int64_t>(begin),
                 [](std::string_view text, size_t from) { return text.find(' ', from); });
  const size_t size = static_cast<size_t>(layout_.dim) * sizeof(float);
  if (space == std::string_view::npos || file_.size() - space - 1 < size) {
    fail(at_, "the file ends inside row ", rows_read_ + 1, " of ", layout_.rows);
  }
  load_to(static_cast<int64_t>(space + 1 + size));
  ++rows_read_;
  begin_ = static_cast<int64_t>(begin);
  at_ = static_cast<int64_t>(space + 1 + size);
  row.word = file_.substr(begin, space - begin);
  if (row.word.empty()) fail<BadRow>(begin_, "a row without a word");
  row.numbers = file_.substr(space + 1, size);
}

void RowReader::next_text(Row& row) {
  const size_t end =
      find(at_, [](std::string_view text, size_t from) { return text.find('\n', from); });
  const std::string_view whole = file_.substr(
      static_cast<size_t>(at_), std::min(end, file_.size()) - static_cast<size_t>(at_));
  const std::string_view line = trim_right(whole);
  at_ += static_cast<int64_t>(std::min(whole.size() + 1, file_.size() - static_cast<size_t>(at_)));
  ++rows_read_;
  if (line.empty()) fail<BadRow>(begin_, "a line without a word");
  const auto [word_begin, word_end] = layout_.tabbed ? word_before_tab(line) : word_in(line);
  row.word = line.substr(word_begin, word_end - word_begin);
  if (row.word.empty()) fail<BadRow>(begin_, "a row without a word");
  row.numbers = line.substr(word_end);
}

void RowReader::refuse_width(int64_t numbers) const {
  fail<BadRow>(begin_, "expected a row of ", layout_.dim, " numbers, got ", numbers);
}

std::pair<size_t, size_t> RowReader::word_before_tab(std::string_view line) const {
  const size_t tab = line.find('\t');
  if (tab == std::string_view::npos) fail<BadRow>(begin_, "expected a TAB after the word");
  const std::string_view rest = line.substr(tab);
  if (count_separators(rest) != layout_.dim) {
    const auto numbers = static_cast<int64_t>(split(rest).size());
    if (numbers != layout_.dim) refuse_width(numbers);
  }
  return {0, tab};
}

std::pair<size_t, size_t> RowReader::word_in(std::string_view line) const {
  if (count_separators(line) == layout_.dim) return {0, line.find_first_of(separators)};
  const std::vector<std::string_view> parts = split(line);
  const int64_t numbers = static_cast<int64_t>(parts.size()) - 1;
  const size_t words = static_cast<size_t>(numbers - layout_.dim + 1);
  if (numbers < layout_.dim || (words > 1 && is_component(parts[words - 1]))) {
    refuse_width(numbers);
  }
  if (words > 1) check_line_ends<BadRow>(line, begin_, parts, words);
  return {static_cast<size_t>(parts[0].begin() - line.begin()),
          static_cast<size_t>(parts[words - 1].end() - line.begin())};
}

// ----------------------------------------------------------------------------------------- numbers

namespace {

const char* name(core::Scalar scalar) {
  constexpr const char* names[] = {"float32", "float64", "bfloat16", "float16"};
  return names[static_cast<size_t>(scalar)];
}

/// Rounds a finite number to its stored type; returns whether it is still finite.
template <typename Number, typename T>
bool store_finite(Number number, T* out) {
  core::store(number, out);
  return std::is_same_v<Number, T> || std::isfinite(core::load(*out));
}

}  // namespace

template <typename Error, typename Number>
void RowReader::refuse_range(const Row& row, std::string_view text, int64_t index,
                             const Number& number, core::Scalar scalar) const {
  fail<Error>(offset(text), "row ", row.number, ", column ", index + 1,
              ": expected a number that is finite in ", name(scalar), ", got ", number);
}

template <typename Number, typename T>
void RowReader::parse(const Row& row, core::Scalar scalar, T* out) const {
  const char* at = row.numbers.data();
  const char* const end = at + row.numbers.size();
  for (int64_t i = 0; i < layout_.dim; ++i) {
    while (at < end && is_separator(*at)) ++at;
    Number number{};
    std::from_chars_result result = parse_number({at, static_cast<size_t>(end - at)}, number);
    if (result.ec == std::errc::result_out_of_range) {  // too near 0, or too large
      number = number_out_of_range<Number>({at, static_cast<size_t>(result.ptr - at)});
    }
    const bool ended = result.ptr == end || is_separator(*result.ptr);
    const bool is_large = result.ec == std::errc::result_out_of_range && !std::isfinite(number);
    if (result.ec == std::errc::invalid_argument || !ended ||
        (!is_large && !std::isfinite(number))) {
      const std::string_view rest{at, static_cast<size_t>(end - at)};
      fail<BadRow>(offset(rest), "expected a finite number, got '",
                   rest.substr(0, std::min<size_t>(rest.find_first_of(separators), 40)), "'");
    }
    const std::string_view text{at, static_cast<size_t>(result.ptr - at)};
    if (is_large) refuse_range<BadRow>(row, text, i, core::brief(text, 40), scalar);
    if (!store_finite(number, out + i)) refuse_range<BadFile>(row, text, i, number, scalar);
    at = result.ptr;
  }
}

template <typename Number, typename T>
void RowReader::convert(const Row& row, core::Scalar scalar, T* out) const {
  for (int64_t i = 0; i < layout_.dim; ++i) {
    const std::string_view bytes = row.numbers.substr(static_cast<size_t>(i) * sizeof(float));
    float number;  // rows begin at any byte
    std::memcpy(&number, bytes.data(), sizeof number);
    if (!std::isfinite(number)) {
      fail<BadRow>(offset(bytes), "expected a finite number, got '", number, "'");
    }
    if (!store_finite(static_cast<Number>(number), out + i)) {
      refuse_range<BadFile>(row, bytes, i, number, scalar);
    }
  }
}

void RowReader::decode(const Row& row, core::Scalar scalar, void* out) const {
  core::visit_scalar(scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Number = core::Compute<T>;
    T* const values = static_cast<T*>(out);
    layout_.binary ? convert<Number>(row, scalar, values) : parse<Number>(row, scalar, values);
  });
}

}  // namespace posembed::pretrained

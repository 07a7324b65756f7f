// Byte-level byte-pair encoding as in GPT-2, Llama 3 and Qwen, read from tokenizer.json: Radford et
// al., "Language Models are Unsupervised Multitask Learners", 2019. Text is cut into words by
// GPT-2's rule, in which every byte above 127 counts as a letter; special tokens are not encoded.
#pragma once

#include <algorithm>
#include <cctype>
#include <climits>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace generate {

class Tokenizer {
 public:
  explicit Tokenizer(const nlohmann::json& file) {
    const auto& model = file.at("model");
    for (const auto& [token, id] : model.at("vocab").items()) add(token, id);
    for (const auto& added : file.at("added_tokens")) add(added.at("content"), added.at("id"));
    for (const auto& merge : model.at("merges")) {
      const bool is_text = merge.is_string();  // "a b", in older files
      const std::string text = is_text ? merge.get<std::string>() : "";
      const size_t space = text.find(' ');
      const auto pair = is_text ? std::pair(text.substr(0, space), text.substr(space + 1))
                                : merge.get<std::pair<std::string, std::string>>();
      ranks_.emplace(pair, static_cast<int>(ranks_.size()));
    }
    // The vocabulary is text: printable bytes stand for themselves, the others for U+0100 and on.
    for (int byte = 0, next = 256; byte < 256; ++byte) {
      const bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
      letters_[byte] = utf8(printable ? byte : next++);
      bytes_[letters_[byte]] = static_cast<char>(byte);
    }
  }

  std::vector<int64_t> encode(const std::string& text) const {
    std::vector<int64_t> ids;
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = end_of_word(text, begin);
      for (const std::string& token : merged(text.substr(begin, end - begin))) {
        ids.push_back(ids_.at(token));
      }
      begin = end;
    }
    return ids;
  }

  std::string decode(int64_t id) const {
    const auto found = tokens_.find(id);
    std::string text;
    if (found == tokens_.end()) return text;
    for (size_t at = 0; at < found->second.size();) {
      const size_t length = static_cast<unsigned char>(found->second[at]) < 128 ? 1 : 2;
      const auto byte = bytes_.find(found->second.substr(at, length));
      if (byte != bytes_.end()) text += byte->second;
      at += length;
    }
    return text;
  }

 private:
  void add(const std::string& token, int64_t id) {
    ids_[token] = id;
    tokens_[id] = token;
  }

  static std::string utf8(int point) {
    if (point < 128) return {static_cast<char>(point)};
    return {static_cast<char>(0xC0 | point >> 6), static_cast<char>(0x80 | (point & 0x3F))};
  }

  enum class Kind { letter, digit, space, other };

  static Kind kind_of(char c) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte > 127 || std::isalpha(byte) != 0) return Kind::letter;
    if (std::isdigit(byte) != 0) return Kind::digit;
    return std::isspace(byte) != 0 ? Kind::space : Kind::other;
  }

  /// 's|'t|'re|'ve|'m|'ll|'d| ?letters| ?digits| ?others|spaces before a space|spaces
  static size_t end_of_word(const std::string& text, size_t begin) {
    for (const char* ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
      if (text.compare(begin, std::string(ending).size(), ending) == 0) {
        return begin + std::string(ending).size();
      }
    }
    const auto run_of = [&](size_t from) {
      size_t end = from;
      while (end < text.size() && kind_of(text[end]) == kind_of(text[from])) ++end;
      return end;
    };
    const bool one_space = text[begin] == ' ' && begin + 1 < text.size();
    if (one_space && kind_of(text[begin + 1]) != Kind::space) return run_of(begin + 1);
    const size_t end = run_of(begin);
    const bool before_word = kind_of(text[begin]) == Kind::space && end < text.size();
    return before_word && end - begin > 1 ? end - 1 : end;
  }

  /// A word's tokens: its bytes, of which the pair with the lowest rank is merged until none has
  /// one.
  std::vector<std::string> merged(const std::string& word) const {
    std::vector<std::string> parts;
    for (const char c : word) parts.push_back(letters_[static_cast<unsigned char>(c)]);
    while (parts.size() > 1) {
      size_t best = 0;
      int best_rank = INT_MAX;
      for (size_t i = 0; i + 1 < parts.size(); ++i) {
        const auto rank = ranks_.find({parts[i], parts[i + 1]});
        if (rank != ranks_.end() && rank->second < best_rank) {
          best = i;
          best_rank = rank->second;
        }
      }
      if (best_rank == INT_MAX) break;
      parts[best] += parts[best + 1];
      parts.erase(parts.begin() + static_cast<int64_t>(best) + 1);
    }
    return parts;
  }

  std::unordered_map<std::string, int64_t> ids_;
  std::unordered_map<int64_t, std::string> tokens_;
  std::map<std::pair<std::string, std::string>, int> ranks_;
  std::string letters_[256];
  std::unordered_map<std::string, char> bytes_;
};

}  // namespace generate

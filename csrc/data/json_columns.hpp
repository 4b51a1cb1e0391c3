// Columns of numbers from lines of JSON objects, such as a run's metrics.
//
// Twin of `columns_reference` in megazero/report/columns.py. A name within an object is joined by a dot, `NaN` stands
// for what a line lacks, and an array directly in a line's object is not read: its column, named `@` and the key, has
// the place of the line, from which a caller reads it. What this does not understand is left to the caller, by number.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace megazero::data {

class JsonColumns {
 public:
  // text: whole lines, each with its line end; base: the place of the text in its file.
  void read(std::string_view text, std::int64_t base) {
    const char* at = text.data();
    const char* const end = at + text.size();
    for (; at < end; ++lines_) {
      const auto* stop = static_cast<const char*>(std::memchr(at, '\n', static_cast<std::size_t>(end - at)));
      if (stop == nullptr) stop = end;
      if (lines_ == 0) expected_rows_ = text.size() / static_cast<std::size_t>(stop - at + 1) * 5 / 4;
      at_ = at;
      stop_ = stop;
      line_ = static_cast<double>(base + (at - text.data()));
      previous_ = kRoot;
      if (object(kRoot, 0) && (blanks(), at_ == stop_)) {
        ++rows_;
      } else {
        refused_.push_back(lines_);
        for (auto& column : columns_) {
          if (column.values.size() > rows_) column.values.resize(rows_);
        }
      }
      at = stop + 1;
    }
    for (auto& column : columns_) column.values.resize(rows_, kMissing);
  }

  struct Column {
    std::string name;
    std::vector<double> values;
  };
  const std::vector<Column>& columns() const { return columns_; }
  const std::vector<std::int64_t>& refused() const { return refused_; }
  std::int64_t lines() const { return lines_; }

 private:
  static constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();
  static constexpr int kRoot = 0;
  static constexpr int kDeepest = 8;
  static constexpr int kElements = 4;  // of an array within an object

  // A key at its place in the tree of objects. `next` is the key that came after it in an earlier line.
  struct Key {
    int parent;
    std::string text;
    std::string name;
    int next = -1;
    int column = -1;
    int place = -1;  // the column of an array's place
  };

  void blanks() {
    while (at_ < stop_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r')) ++at_;
  }

  bool take(char wanted) {
    blanks();
    if (at_ >= stop_ || *at_ != wanted) return false;
    ++at_;
    return true;
  }

  // A string without its quotes; `plain` says whether nothing in it is escaped.
  bool text(std::string_view& out, bool& plain) {
    if (!take('"')) return false;
    const char* const begin = at_;
    plain = true;
    while (at_ < stop_ && *at_ != '"') {
      if (*at_ == '\\') {
        plain = false;
        ++at_;
      }
      ++at_;
    }
    if (at_ >= stop_) return false;
    out = std::string_view(begin, static_cast<std::size_t>(at_ - begin));
    ++at_;
    return true;
  }

  // The key that is read next, if it is the one that came at this place in an earlier line; else -1.
  int expected(int parent) {
    blanks();
    const int guess = keys_[static_cast<std::size_t>(previous_)].next;
    if (guess < 0) return -1;
    const Key& key = keys_[static_cast<std::size_t>(guess)];
    const std::size_t size = key.text.size();
    if (key.parent != parent || static_cast<std::size_t>(stop_ - at_) < size + 2 || at_[0] != '"' ||
        at_[size + 1] != '"' || std::memcmp(at_ + 1, key.text.data(), size) != 0) {
      return -1;
    }
    at_ += size + 2;
    previous_ = guess;
    return guess;
  }

  int key_of(int parent, std::string_view text) {
    const int guess = keys_[static_cast<std::size_t>(previous_)].next;
    int found = guess;
    if (guess < 0 || keys_[static_cast<std::size_t>(guess)].parent != parent ||
        keys_[static_cast<std::size_t>(guess)].text != text) {
      std::string whole = std::to_string(parent) + ":" + std::string(text);
      const auto [entry, fresh] = numbers_.try_emplace(std::move(whole), static_cast<int>(keys_.size()));
      found = entry->second;
      if (fresh) {
        const std::string& above = keys_[static_cast<std::size_t>(parent)].name;
        keys_.push_back({parent, std::string(text), (above.empty() ? "" : above + ".") + std::string(text)});
      }
      keys_[static_cast<std::size_t>(previous_)].next = found;
    }
    previous_ = found;
    return found;
  }

  void put(int& column, const std::string& name, double value) {
    if (column < 0) {
      column = static_cast<int>(columns_.size());
      columns_.push_back({name, {}});
      columns_.back().values.reserve(expected_rows_);
    }
    auto& values = columns_[static_cast<std::size_t>(column)].values;
    if (values.size() > rows_) {
      values.back() = value;
    } else {
      values.resize(rows_, kMissing);
      values.push_back(value);
    }
  }

  void put(int key, double value) {
    Key& entry = keys_[static_cast<std::size_t>(key)];
    put(entry.column, entry.name, value);
  }

  bool object(int parent, int depth) {
    if (depth > kDeepest || !take('{')) return false;
    if (take('}')) return true;
    do {
      int key = expected(parent);
      if (key < 0) {
        std::string_view word;
        bool plain = true;
        if (!text(word, plain) || !plain) return false;
        key = key_of(parent, word);
      }
      if (!take(':') || !value(key, depth)) return false;
    } while (take(','));
    return take('}');
  }

  bool value(int key, int depth) {
    blanks();
    if (at_ >= stop_) return false;
    switch (*at_) {
      case '{':
        return object(key, depth + 1);
      case '[': {
        if (depth > 0) return array(key, depth);
        Key& entry = keys_[static_cast<std::size_t>(key)];
        put(entry.place, "@" + entry.name, line_);
        return skip();
      }
      case '"': {
        std::string_view word;
        bool plain = true;
        if (!text(word, plain)) return false;
        const double infinity = std::numeric_limits<double>::infinity();
        if (word == "Infinity") put(key, infinity);
        if (word == "-Infinity") put(key, -infinity);
        return true;
      }
      case 't':
        return literal("true", key, 1.0);
      case 'f':
        return literal("false", key, 0.0);
      case 'n':
        return literal("null", key, kMissing);
      default:
        return number(key);
    }
  }

  bool literal(std::string_view word, int key, double value) {
    if (static_cast<std::size_t>(stop_ - at_) < word.size() || std::memcmp(at_, word.data(), word.size()) != 0) {
      return false;
    }
    at_ += word.size();
    if (value == value) put(key, value);
    return true;
  }

  bool number(int key) {
    if (*at_ != '-' && (*at_ < '0' || *at_ > '9')) return false;
    double value = 0.0;
#if defined(__cpp_lib_to_chars)
    const auto [after, error] = std::from_chars(at_, stop_, value);
    if (error == std::errc::result_out_of_range) {
      value = std::strtod(at_, nullptr);  // 0 or infinity, as in Python; the line's end follows, so it stops
    } else if (error != std::errc()) {
      return false;
    }
    at_ = after;
#else
    char* after = nullptr;
    value = std::strtod(at_, &after);
    if (after == at_ || after > stop_) return false;
    at_ = after;
#endif
    put(key, value);
    return true;
  }

  bool array(int key, int depth) {
    if (depth > kDeepest || !take('[')) return false;
    if (take(']')) return true;
    int index = 0;
    do {
      blanks();
      if (at_ >= stop_) return false;
      const char numeral = static_cast<char>('0' + index);
      if (!(index < kElements ? value(key_of(key, std::string_view(&numeral, 1)), depth + 1) : skip())) return false;
      ++index;
    } while (take(','));
    return take(']');
  }

  // Any value, of which nothing but its end is looked for.
  bool skip() {
    int open = 0;
    while (at_ < stop_) {
      const char character = *at_;
      if (character == '"') {
        std::string_view word;
        bool plain = true;
        if (!text(word, plain)) return false;
        if (open == 0) return true;
        continue;
      }
      if (open == 0 && (character == ',' || character == ']' || character == '}')) return true;
      ++at_;
      open += (character == '[' || character == '{') - (character == ']' || character == '}');
      if (open == 0 && (character == ']' || character == '}')) return true;
    }
    return open == 0;
  }

  const char* at_ = nullptr;
  const char* stop_ = nullptr;
  double line_ = 0.0;
  int previous_ = kRoot;
  std::size_t rows_ = 0;
  std::size_t expected_rows_ = 0;
  std::int64_t lines_ = 0;
  std::vector<Key> keys_{{-1, "", ""}};
  std::unordered_map<std::string, int> numbers_;
  std::vector<Column> columns_;
  std::vector<std::int64_t> refused_;
};

}  // namespace megazero::data

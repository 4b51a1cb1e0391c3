#include "mpu/collectives.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace megazero::mpu {
namespace {

// A slot that holds a piece for each other member has the pieces in rank order, leaving out its owner.
int piece_of(int owner, int other) { return other - (other > owner ? 1 : 0); }

// Pieces start on cache lines.
std::int64_t piece_bytes(std::size_t slot, int pieces) {
  return static_cast<std::int64_t>(slot / static_cast<std::size_t>(pieces)) / 64 * 64;
}

void copy(char* to, const char* from, std::int64_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, static_cast<std::size_t>(bytes));
}

using Sources = std::array<const void*, kMostRanks>;

// Where each member's bytes start, followed by where the last member's bytes end.
using Offsets = std::array<std::int64_t, kMostRanks + 1>;

Offsets offsets_of(const std::vector<std::int64_t>& sizes) {
  Offsets offsets{};
  std::partial_sum(sizes.begin(), sizes.end(), offsets.begin() + 1);
  return offsets;
}

// Up to this size, each member of a group of more than two reduces the whole tensor.
constexpr std::int64_t kWholeBytes = 8 << 10;

}  // namespace

void Collectives::begin(const std::string& text) {
  text_ = &text;
  first_ = true;
}

// Waits until all members have come this far. What they wrote before is then visible here.
void Collectives::meet() {
  if (first_) {
    Header& header = segment_.header(me_, turn_);
    std::strncpy(header.text, text_->c_str(), kTextBytes - 1);
    header.text[kTextBytes - 1] = '\0';
  }
  const std::uint32_t round = ++rounds_;
  Word& mine = segment_.member(me_).arrived;
  mine.value.store(round);
  wake(mine);
  const auto arrived = [&](int r) {
    return static_cast<std::int32_t>(segment_.member(r).arrived.value.load() - round) >= 0;
  };
  const auto absent = [&] {
    std::vector<int> ranks;
    for (int r = 0; r < size_; ++r) {
      if (!arrived(r)) ranks.push_back(r);
    }
    return ranks;
  };
  for (int r = 0; r < size_; ++r) {
    wait_until(
        segment_.member(r).arrived, [&] { return arrived(r); },
        [&](Clock::duration waited) { segment_.check(absent, waited, "did not arrive"); });
  }
  if (first_) compare_calls();
  first_ = false;
}

void Collectives::compare_calls() {
  bool differ = false;
  std::string listing;
  for (int r = 0; r < size_; ++r) {
    const char* text = segment_.header(r, turn_).text;
    differ = differ || std::strncmp(text, segment_.header(me_, turn_).text, kTextBytes) != 0;
    listing += (r > 0 ? "; " : "") + segment_.name(r) + ": " + text;
  }
  if (differ) throw std::runtime_error("the members made different calls: " + listing);
}

std::int64_t Collectives::compare_splits() {
  std::int64_t longest = 0;
  for (int from = 0; from < size_; ++from) {
    for (int to = 0; to < size_; ++to) {
      const std::int64_t sent = segment_.header(from, turn_).sends[to];
      longest = std::max(longest, sent);
      const std::int64_t expected = segment_.header(to, turn_).receives[from];
      if (sent != expected) {
        throw std::runtime_error(segment_.name(from) + " sends " + std::to_string(sent) + " bytes to " +
                                 segment_.name(to) + ", which expects " + std::to_string(expected));
      }
    }
  }
  return longest;
}

void Collectives::barrier(const std::string& text) {
  begin(text);
  next_slot();
  meet();
}

void Collectives::all_reduce(const std::string& text, char* data, std::int64_t elements, Element element) {
  begin(text);
  const std::int64_t chunk = static_cast<std::int64_t>(segment_.sizes().slot) / element.bytes;
  std::int64_t at = 0;
  do {
    const std::int64_t now = std::min(chunk, elements - at);
    // One meeting if each member reduces everything; two if each reduces a share, but much less to read for many.
    if (size_ == 2 || now * element.bytes <= kWholeBytes) {
      reduce_whole(data + at * element.bytes, now, element);
    } else {
      reduce_shares(data + at * element.bytes, now, element);
    }
    at += now;
  } while (at < elements);
}

void Collectives::reduce_whole(char* data, std::int64_t elements, const Element& element) {
  copy(next_slot(), data, elements * element.bytes);
  meet();
  Sources sources;
  for (int r = 0; r < size_; ++r) sources[static_cast<std::size_t>(r)] = r == me_ ? data : slot_of(r);
  element.reducer(sources.data(), size_, data, elements);
}

void Collectives::reduce_shares(char* data, std::int64_t elements, const Element& element) {
  const auto begin_of = [&](int r) { return elements * r / size_ * element.bytes; };
  const std::int64_t mine = begin_of(me_);
  const std::int64_t count = (begin_of(me_ + 1) - mine) / element.bytes;
  char* const slot = next_slot();
  copy(slot, data, elements * element.bytes);
  meet();
  Sources sources;
  for (int r = 0; r < size_; ++r) sources[static_cast<std::size_t>(r)] = slot_of(r) + mine;
  // Nobody else reads this share of this slot before the next meeting, nor its other shares after it.
  element.reducer(sources.data(), size_, slot + mine, count);
  meet();
  for (int r = 0; r < size_; ++r) copy(data + begin_of(r), slot_of(r) + begin_of(r), begin_of(r + 1) - begin_of(r));
}

void Collectives::all_gather(const std::string& text, char* output, const char* input, std::int64_t bytes) {
  begin(text);
  const auto chunk = static_cast<std::int64_t>(segment_.sizes().slot);
  std::int64_t at = 0;
  do {
    const std::int64_t now = std::min(chunk, bytes - at);
    copy(next_slot(), input + at, now);
    meet();
    for (int r = 0; r < size_; ++r) copy(output + r * bytes + at, r == me_ ? input + at : slot_of(r), now);
    at += now;
  } while (at < bytes);
}

void Collectives::reduce_scatter(const std::string& text, char* output, const char* input, std::int64_t elements,
                                 Element element) {
  begin(text);
  const std::int64_t piece = piece_bytes(segment_.sizes().slot, size_ - 1);
  const std::int64_t row = elements * element.bytes;
  std::int64_t at = 0;
  do {
    const std::int64_t now = std::min(piece, row - at);
    char* const slot = next_slot();
    for (int r = 0; r < size_; ++r) {
      if (r != me_) copy(slot + piece_of(me_, r) * piece, input + r * row + at, now);
    }
    meet();
    Sources sources;
    for (int r = 0; r < size_; ++r) {
      sources[static_cast<std::size_t>(r)] =
          r == me_ ? input + me_ * row + at : slot_of(r) + piece_of(r, me_) * piece;
    }
    element.reducer(sources.data(), size_, output + at, now / element.bytes);
    at += now;
  } while (at < row);
}

void Collectives::broadcast(const std::string& text, char* data, std::int64_t bytes, int source) {
  begin(text);
  const auto chunk = static_cast<std::int64_t>(segment_.sizes().slot);
  std::int64_t at = 0;
  do {
    const std::int64_t now = std::min(chunk, bytes - at);
    char* const slot = next_slot();
    if (me_ == source) copy(slot, data + at, now);
    meet();
    if (me_ != source) copy(data + at, slot_of(source), now);
    at += now;
  } while (at < bytes);
}

void Collectives::all_to_all(const std::string& text, char* output, const char* input,
                             const std::vector<std::int64_t>& receives, const std::vector<std::int64_t>& sends) {
  begin(text);
  const std::int64_t piece = piece_bytes(segment_.sizes().slot, size_ - 1);
  const Offsets from = offsets_of(sends);
  const Offsets to = offsets_of(receives);
  Header& header = segment_.header(me_, turn_ + 1);
  std::copy(sends.begin(), sends.end(), header.sends);
  std::copy(receives.begin(), receives.end(), header.receives);
  std::int64_t longest = 0;  // the longest of all messages, known after the first meeting
  std::int64_t at = 0;
  do {
    const auto now = [&](const Offsets& of, int r) {
      return std::clamp<std::int64_t>(of[r + 1] - of[r] - at, 0, piece);
    };
    char* const slot = next_slot();
    for (int r = 0; r < size_; ++r) {
      if (r != me_) copy(slot + piece_of(me_, r) * piece, input + from[r] + at, now(from, r));
    }
    meet();
    if (at == 0) longest = compare_splits();
    for (int r = 0; r < size_; ++r) {
      const char* source = r == me_ ? input + from[me_] + at : slot_of(r) + piece_of(r, me_) * piece;
      copy(output + to[r] + at, source, now(to, r));
    }
    at += piece;
  } while (at < longest);
}

}  // namespace megazero::mpu

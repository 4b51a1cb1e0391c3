// Collectives in chunks. Everyone writes a chunk into its slot, says so, waits until all have, and reads what it needs
// from the others' slots. Slots are used in turn: who has arrived with a chunk has finished reading the one before, so
// that the slot before that is free again, and one meeting per chunk is enough.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shared/reduce.hpp"
#include "shared/segment.hpp"

namespace megazero::shared {

// One member's side. Calls of several threads must be put in order by the caller. A call that throws
// std::runtime_error (someone is missing, or calls differ) leaves the group unusable.
class Collectives {
 public:
  explicit Collectives(Segment& segment) : segment_(segment), me_(segment.rank()), size_(segment.size()) {}

  // `text` describes the call and must be the same on all members. All sizes but `elements` are in bytes.
  void barrier(const std::string& text);
  void all_reduce(const std::string& text, char* data, std::int64_t elements, Element element);
  void all_gather(const std::string& text, char* output, const char* input, std::int64_t bytes);
  void reduce_scatter(const std::string& text, char* output, const char* input, std::int64_t elements,
                      Element element);
  void broadcast(const std::string& text, char* data, std::int64_t bytes, int source);
  void all_to_all(const std::string& text, char* output, const char* input, const std::vector<std::int64_t>& receives,
                  const std::vector<std::int64_t>& sends);

 private:
  void begin(const std::string& text);
  char* next_slot() { return segment_.slot(me_, ++turn_); }
  char* slot_of(int rank) { return segment_.slot(rank, turn_); }
  void meet();
  void compare_calls();
  std::int64_t compare_splits();  // the longest message in bytes
  void reduce_whole(char* data, std::int64_t elements, const Element& element);
  void reduce_shares(char* data, std::int64_t elements, const Element& element);

  Segment& segment_;
  int me_;
  int size_;
  std::uint64_t turn_ = 0;    // chunks so far: the next is written to slot (turn_ + 1) % 2
  std::uint32_t rounds_ = 0;  // meetings so far
  const std::string* text_ = nullptr;
  bool first_ = false;  // whether the next meeting is the first of a call
};

}  // namespace megazero::shared

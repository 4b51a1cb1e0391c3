// Collectives in chunks. Each member writes a chunk into its slot, says so, waits until all have done the same, and
// reads what it needs from the others' slots. Slots are used in turn: a member that has arrived with a chunk has
// finished reading the one before, so the slot before that one is free again, and one meeting per chunk is enough.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mpu/reduce.hpp"
#include "mpu/segment.hpp"

namespace megazero::mpu {

// One member's side. The caller must put calls from several threads in order. A call that throws std::runtime_error
// (a member is missing, or calls differ) leaves the group unusable.
class Collectives {
 public:
  explicit Collectives(Segment& segment) : segment_(segment), me_(segment.rank()), size_(segment.size()) {}

  // `text` describes the call and must be the same on all members. All sizes except `elements` are in bytes.
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
  std::uint64_t turn_ = 0;    // chunks so far; the next is written to slot (turn_ + 1) % 2
  std::uint32_t rounds_ = 0;  // meetings so far
  const std::string* text_ = nullptr;
  bool first_ = false;  // whether the next meeting is the first of a call
};

}  // namespace megazero::mpu

// A row of floats, initially zero, for each thread: to sum its share of the rows, or to keep what it needs.
#pragma once

#include <cstdint>
#include <vector>

namespace megazero {

class ThreadRows {
 public:
  ThreadRows(int workers, std::int64_t width)
      : workers_(workers), width_(width), partial_(static_cast<std::size_t>(workers * width), 0.0f) {}

  float* of(std::int64_t worker) { return partial_.data() + worker * width_; }

  // Writes the sums over all threads, taken in a fixed order.
  void write_sum(float* out) const {
    for (std::int64_t column = 0; column < width_; ++column) {
      float total = 0.0f;
      for (std::int64_t worker = 0; worker < workers_; ++worker) {
        total += partial_[static_cast<std::size_t>(worker * width_ + column)];
      }
      out[column] = total;
    }
  }

 private:
  std::int64_t workers_;
  std::int64_t width_;
  std::vector<float> partial_;
};

}  // namespace megazero

#include "mpu/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace megazero::mpu {
namespace {

constexpr std::size_t kPage = 4096;

std::size_t whole_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

constexpr std::size_t kHeaderBytes = (sizeof(Header) + kPage - 1) / kPage * kPage;

std::size_t slot_at(const Sizes& sizes, int rank, std::uint64_t turn) {
  return whole_pages(sizeof(Control)) + (2 * static_cast<std::size_t>(rank) + turn % 2) * (kHeaderBytes + sizes.slot);
}

std::system_error failure(const char* what) { return {errno, std::generic_category(), what}; }

struct flock lock_of(int rank) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

std::size_t segment_end(const Sizes& sizes) { return slot_at(sizes, sizes.members, 0); }

Segment::Segment(int file, int rank, std::vector<int> world_ranks, Sizes sizes, double timeout)
    : file_(-1),
      rank_(rank),
      world_ranks_(std::move(world_ranks)),
      sizes_(sizes),
      timeout_(timeout) {
  void* memory = mmap(nullptr, segment_end(sizes_), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) throw failure("mapping shared memory");
  memory_ = static_cast<char*>(memory);
  struct flock lock = lock_of(rank_);
  if (fcntl(file, F_SETLK, &lock) != 0) {
    const std::system_error error = failure("locking shared memory");
    munmap(memory, segment_end(sizes_));
    throw error;
  }
  file_ = file;
  member(rank_).process.store(getpid());
}

Segment::~Segment() {
  munmap(memory_, segment_end(sizes_));
  close(file_);  // releases the lock
}

Header& Segment::header(int rank, std::uint64_t turn) {
  return *reinterpret_cast<Header*>(memory_ + slot_at(sizes_, rank, turn));
}

char* Segment::slot(int rank, std::uint64_t turn) {
  return memory_ + slot_at(sizes_, rank, turn) + kHeaderBytes;
}

std::string Segment::name(int rank) const {
  return "rank " + std::to_string(world_ranks_[static_cast<std::size_t>(rank)]);
}

void Segment::abandon() {
  std::int32_t nobody = 0;
  control().abandoned_by.compare_exchange_strong(nobody, rank_ + 1);
  for (int r = 0; r < size(); ++r) wake(member(r).arrived);
}

// Our own process's lock never conflicts with our queries, but we know that we are here.
bool Segment::is_there(int rank) const {
  if (rank == rank_) return true;
  struct flock lock = lock_of(rank);
  return fcntl(file_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

void Segment::check(const std::function<std::vector<int>()>& absent, Clock::duration waited, const char* not_done) {
  if (closing_.load()) throw std::runtime_error("the group was closed");
  const std::vector<int> ranks = absent();
  for (const int r : ranks) {
    if (is_there(r)) continue;
    const std::vector<int> still = absent();  // it may have done its part and left since
    if (std::find(still.begin(), still.end(), r) == still.end()) continue;
    throw std::runtime_error(name(r) + " (process " + std::to_string(member(r).process.load()) +
                             ") has ended or left the group");
  }
  if (const std::int32_t by = control().abandoned_by.load(); by != 0 && by != rank_ + 1) {
    throw std::runtime_error(name(by - 1) + " gave up; see its error");
  }
  if (std::chrono::duration<double>(waited).count() > timeout_) {
    std::ostringstream text;
    for (std::size_t i = 0; i < ranks.size(); ++i) text << (i > 0 ? ", " : "") << name(ranks[i]);
    text << ' ' << not_done << " within " << timeout_ << " s";
    throw std::runtime_error(text.str());
  }
}

}  // namespace megazero::mpu

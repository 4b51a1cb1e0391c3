#include "common/on_cpu/watch.hpp"

#include <algorithm>
#include <sstream>

namespace megazero::on_cpu {

namespace {

constexpr std::size_t kSector = 32;
constexpr std::int64_t kMostFaultsTold = 5;  // of a kernel and kind

const Buffer* find(const std::vector<Buffer>& buffers, const void* address, std::size_t bytes) {
  const char* at = static_cast<const char*>(address);
  for (const Buffer& each : buffers) {
    if (at >= each.begin && at + bytes <= each.begin + each.bytes) return &each;
  }
  return nullptr;
}

}  // namespace

std::size_t Watch::Hash::operator()(const Key& key) const {
  std::uint64_t mixed = reinterpret_cast<std::uintptr_t>(key.site.file) * 31 + static_cast<std::uint64_t>(key.site.line);
  mixed = (mixed * 1000003 + static_cast<std::uint64_t>(key.warp)) * 0x9E3779B97F4A7C15ull + key.time;
  return static_cast<std::size_t>(mixed ^ mixed >> 29);
}

void Arrivals::begin_block() {
  seen_.clear();
  fences_.clear();
  arrival_ = {};
  fenced_ = false;
}

void Arrivals::fence(const Moment& now) {
  fences_[now.thread] = now;
  fenced_ = fenced_ || arrival_.thread == now.thread;
}

void Arrivals::add(const void* counter, const Moment& now) {
  Blocks& here = released_[counter];
  for (const auto& [block, arrival] : here) seen_[block] = arrival;
  const auto last = fences_.find(now.thread);
  if (last != fences_.end() && last->second.block_epoch == now.block_epoch) here[now.block] = now;
  arrival_ = now;
  fenced_ = false;
}

bool Arrivals::order(const Moment& past, const Moment& now) const {
  const auto other = seen_.find(past.block);
  if (!fenced_ || other == seen_.end()) return false;
  const Moment& released = other->second;
  const bool before = past.thread == released.thread || past.block_epoch < released.block_epoch;
  return before && (now.thread == arrival_.thread || now.block_epoch > arrival_.block_epoch);
}

// Whether nothing orders an access and a later one.
bool Watch::races(const Moment& past, const Moment& now) const {
  if (!past.exists() || (past.block == now.block && past.thread == now.thread)) return false;
  if (past.block != now.block) return !arrivals_.order(past, now);
  if (past.block_epoch != now.block_epoch) return false;
  return past.thread / 32 != now.thread / 32 || past.warp_epoch == now.warp_epoch;
}

void Watch::declare(const void* begin, std::size_t bytes) {
  buffers_.push_back({static_cast<const char*>(begin), bytes, {}});
}

void Watch::begin_launch(const char* kernel, dim3 threads, std::size_t shared_bytes) {
  kernel_ = kernel;
  kernel_.erase(std::remove(kernel_.begin(), kernel_.end(), '('), kernel_.end());
  kernel_.erase(std::min(kernel_.find_first_of("<)"), kernel_.size()));
  counts_ = &by_kernel_[kernel_];
  ++counts_->launches;
  counts_->threads_per_block = std::max<std::int64_t>(counts_->threads_per_block, threads.x * threads.y * threads.z);
  counts_->shared_bytes = std::max<std::int64_t>(counts_->shared_bytes, static_cast<std::int64_t>(shared_bytes));
  for (Buffer& each : buffers_) each.history.assign(each.bytes, {});
  arrivals_.begin_launch();
}

void Watch::begin_block() {
  shared_.clear();
  arrivals_.begin_block();
}

void Watch::end_block() {
  for (const auto& each : global_accesses_) count_global(each.second);
  for (const auto& each : shared_accesses_) count_shared(each.second);
  global_accesses_.clear();
  shared_accesses_.clear();
  global_times_.clear();
  shared_times_.clear();
  std::int64_t held = 0;
  for (const Buffer& each : shared_) held += static_cast<std::int64_t>(each.bytes);
  counts_->shared_bytes = std::max(counts_->shared_bytes, held);
}

void Watch::declare_shared(const void* begin, std::size_t bytes) {
  shared_.push_back({static_cast<const char*>(begin), bytes, std::vector<History>(bytes)});
}

void Watch::fault(std::int64_t Counts::*kind, Site site, const Moment& now, const char* what) {
  if (++(counts_->*kind) > kMostFaultsTold) return;
  std::ostringstream text;
  text << kernel_ << ": " << what << " at " << site.file << ":" << site.line << " by thread " << now.thread
       << " of block " << now.block;
  faults_.push_back(text.str());
}

// Records the access for each byte; returns whether it races with an earlier one.
bool Watch::note(std::vector<History>& history, std::size_t first, std::size_t bytes, Access access, const Moment& now) {
  bool raced = false;
  for (std::size_t i = first; i < first + bytes; ++i) {
    History& past = history[i];
    raced |= races(past.write, now);
    if (access != Access::kAtomic) raced |= races(past.atomic, now);
    if (access == Access::kRead || access == Access::kCachedRead) {
      if (past.read.thread != now.thread || past.read.block != now.block) past.other_read = past.read;
      past.read = now;
    } else {
      raced |= races(past.read, now) || races(past.other_read, now);
      (access == Access::kWrite ? past.write : past.atomic) = now;
    }
  }
  return raced;
}

void Watch::join(bool shared, const void* address, std::size_t bytes, Access kind, Site site, const Moment& now) {
  const std::uint32_t time = (shared ? shared_times_ : global_times_)[{site, now.thread, 0}]++;
  Together& access = (shared ? shared_accesses_ : global_accesses_)[{site, now.thread / 32, time}];
  access.lanes.push_back({reinterpret_cast<std::uintptr_t>(address), static_cast<std::uint32_t>(bytes)});
  access.kind = kind;
}

void Watch::global(const void* address, std::size_t bytes, Access access, Site site, const Moment& now) {
  if (reinterpret_cast<std::uintptr_t>(address) % bytes != 0) {
    fault(&Counts::misaligned, site, now, "a misaligned access of global memory");
  }
  auto* buffer = const_cast<Buffer*>(find(buffers_, address, bytes));
  if (buffer == nullptr) {
    fault(&Counts::out_of_bounds, site, now, "an access of global memory outside of every buffer");
    throw OutOfBounds{};
  }
  const auto first = static_cast<std::size_t>(static_cast<const char*>(address) - buffer->begin);
  const bool cached = access == Access::kCachedRead;
  if (cached && !buffer->history[first].read.exists()) counts_->cached_bytes += static_cast<std::int64_t>(bytes);
  if (note(buffer->history, first, bytes, access, now)) fault(&Counts::races, site, now, "a race on global memory");
  join(false, address, bytes, access, site, now);
}

void Watch::shared(const void* address, std::size_t bytes, Access access, Site site, const Moment& now) {
  auto* buffer = const_cast<Buffer*>(find(shared_, address, bytes));
  if (buffer == nullptr) {
    fault(&Counts::out_of_bounds, site, now, "an access of shared memory outside of every array");
    throw OutOfBounds{};
  }
  const auto first = static_cast<std::size_t>(static_cast<const char*>(address) - buffer->begin);
  if (access == Access::kRead && !buffer->history[first].write.exists()) {
    fault(&Counts::unwritten_reads, site, now, "a read of shared memory that nobody wrote");
  }
  if (note(buffer->history, first, bytes, access, now)) fault(&Counts::races, site, now, "a race on shared memory");
  join(true, address, bytes, access, site, now);
}

// The bytes that the access moves, the sectors that it touches, and the fewest that those bytes would fit in.
void Watch::count_global(const Together& access) {
  if (access.kind == Access::kCachedRead) return;
  std::vector<std::uintptr_t> sectors, starts;
  std::size_t distinct = 0;
  for (const Reach& each : access.lanes) {
    sectors.push_back(each.address / kSector);
    if (std::find(starts.begin(), starts.end(), each.address) == starts.end()) {
      starts.push_back(each.address);
      distinct += each.bytes;
    }
  }
  std::sort(sectors.begin(), sectors.end());
  counts_->sectors += std::unique(sectors.begin(), sectors.end()) - sectors.begin();
  if (access.kind != Access::kWrite) counts_->bytes_read += static_cast<std::int64_t>(distinct);
  if (access.kind != Access::kRead) counts_->bytes_written += static_cast<std::int64_t>(distinct);
  counts_->ideal_sectors += static_cast<std::int64_t>((distinct + kSector - 1) / kSector);
}

// The 32 banks serve a word each at once; accesses of 8 and 16 bytes go by half and quarter warps.
void Watch::count_shared(const Together& access) {
  const std::size_t lanes_at_once = 128 / std::max<std::size_t>(access.lanes.front().bytes, 4);
  for (std::size_t begin = 0; begin < access.lanes.size(); begin += lanes_at_once) {
    std::vector<std::uintptr_t> words;
    for (std::size_t i = begin; i < std::min(begin + lanes_at_once, access.lanes.size()); ++i) {
      for (std::uint32_t offset = 0; offset < access.lanes[i].bytes; offset += 4) {
        words.push_back((access.lanes[i].address + offset) / 4);
      }
    }
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    std::int64_t in_bank[32] = {};
    for (const std::uintptr_t word : words) ++in_bank[word % 32];
    counts_->shared_accesses += 1;
    counts_->bank_conflicts += *std::max_element(in_bank, in_bank + 32) - 1;
  }
}

std::string Watch::report() const {
  std::ostringstream json;
  json << "{\"kernels\": {";
  const char* comma = "";
  for (const auto& [name, c] : by_kernel_) {
    json << comma << "\"" << name << "\": {\"launches\": " << c.launches
         << ", \"threads_per_block\": " << c.threads_per_block << ", \"shared_bytes\": " << c.shared_bytes
         << ", \"bytes_read\": " << c.bytes_read << ", \"bytes_written\": " << c.bytes_written
         << ", \"cached_bytes\": " << c.cached_bytes << ", \"sectors\": " << c.sectors
         << ", \"ideal_sectors\": " << c.ideal_sectors << ", \"shared_accesses\": " << c.shared_accesses
         << ", \"bank_conflicts\": " << c.bank_conflicts << ", \"races\": " << c.races
         << ", \"divergent_barriers\": " << c.divergent_barriers << ", \"out_of_bounds\": " << c.out_of_bounds
         << ", \"misaligned\": " << c.misaligned << ", \"unwritten_reads\": " << c.unwritten_reads
         << ", \"bad_launches\": " << c.bad_launches << "}";
    comma = ", ";
  }
  json << "}, \"faults\": [";
  comma = "";
  for (const std::string& each : faults_) {
    json << comma << "\"" << each << "\"";
    comma = ", ";
  }
  json << "]}";
  return json.str();
}

void Watch::reset() {
  by_kernel_.clear();
  faults_.clear();
}

}  // namespace megazero::on_cpu

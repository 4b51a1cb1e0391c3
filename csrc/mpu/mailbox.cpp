#include "mpu/mailbox.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace megazero::mpu {
namespace {

// The other side can start on one piece while the next is being copied.
constexpr std::uint64_t kPiece = 256 << 10;

// Whose messages may be put aside: those of one member, or
constexpr int kNobody = -1;
constexpr int kEverybody = -2;

// Copies between memory and a ring, where `at` counts bytes since the ring's beginning.
void write_ring(char* ring, std::uint64_t size, std::uint64_t at, const char* from, std::uint64_t bytes) {
  const std::uint64_t start = at % size;
  const std::uint64_t first = std::min(bytes, size - start);
  std::memcpy(ring + start, from, first);
  std::memcpy(ring, from + first, bytes - first);
}

void read_ring(const char* ring, std::uint64_t size, std::uint64_t at, char* to, std::uint64_t bytes) {
  const std::uint64_t start = at % size;
  const std::uint64_t first = std::min(bytes, size - start);
  std::memcpy(to, ring + start, first);
  std::memcpy(to + first, ring, bytes - first);
}

Handle make_message(int peer, bool outgoing, std::int64_t tag, const std::string& text, char* data,
                    std::int64_t bytes) {
  auto message = std::make_shared<Message>();
  message->peer = peer;
  message->outgoing = outgoing;
  message->data = data;
  message->frame.bytes = bytes;
  message->frame.tag = tag;
  std::strncpy(message->frame.text, text.c_str(), sizeof(message->frame.text) - 1);
  return message;
}

std::uint64_t length(const Message& message) {
  return sizeof(Frame) + static_cast<std::uint64_t>(message.frame.bytes);
}

}  // namespace

Mailbox::Mailbox(Segment& segment)
    : segment_(segment),
      me_(segment.rank()),
      outgoing_(static_cast<std::size_t>(segment.size())),
      inboxes_(static_cast<std::size_t>(segment.size())) {}

Mailbox::~Mailbox() {
  {
    const std::lock_guard<std::mutex> hold(mutex_);
    closing_ = true;
  }
  work_.notify_all();
  notify(me_);
  if (thread_.joinable()) thread_.join();
}

Handle Mailbox::send(int peer, std::int64_t tag, const std::string& text, const char* data, std::int64_t bytes) {
  const std::lock_guard<std::mutex> hold(mutex_);
  segment_.reserve_ring(peer);
  // The bytes are only read, but an incoming message shares this type and is written.
  outgoing_[static_cast<std::size_t>(peer)].push_back(
      make_message(peer, true, tag, text, const_cast<char*>(data), bytes));
  return outgoing_[static_cast<std::size_t>(peer)].back();
}

Handle Mailbox::receive(int peer, std::int64_t tag, const std::string& text, char* data, std::int64_t bytes) {
  const std::lock_guard<std::mutex> hold(mutex_);
  const Handle asked = make_message(peer, false, tag, text, data, bytes);
  Inbox& inbox = inboxes_[static_cast<std::size_t>(peer)];
  std::deque<Handle>& waiting = inbox.unasked[tag];
  if (waiting.empty()) {
    inbox.asked[tag].push_back(asked);
  } else {
    const Handle come = waiting.front();
    waiting.pop_front();
    accept(asked, come);
  }
  return asked;
}

void Mailbox::start() {
  const std::lock_guard<std::mutex> hold(mutex_);
  progress(kNobody);
  if (!has_outgoing()) return;
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  work_.notify_all();
}

void Mailbox::wait(const Handle& message) {
  Word& doorbell = segment_.member(me_).doorbell;
  const auto complete = [&](int aside) {
    const std::lock_guard<std::mutex> hold(mutex_);
    if (!message->complete) progress(aside);
    return message->complete.load();
  };
  // Before sleeping, everything that has come is put aside: a ring of senders may all be waiting for room.
  const auto absent = [&] { return complete(kEverybody) ? std::vector<int>{} : std::vector<int>{message->peer}; };
  const char* not_done = message->outgoing ? "did not take it" : "did not send it";
  wait_until(
      doorbell, [&] { return complete(message->peer); },
      [&](Clock::duration waited) { segment_.check(absent, waited, not_done); });
  if (!message->failure.empty()) throw std::runtime_error(message->failure);
}

void Mailbox::progress(int aside) {
  for (int peer = 0; peer < segment_.size(); ++peer) {
    while (push(peer) || pull(peer, aside == kEverybody || aside == peer)) {
    }
  }
}

// Writes the next piece to `peer`, if there is one and there is room for it.
bool Mailbox::push(int peer) {
  std::deque<Handle>& queue = outgoing_[static_cast<std::size_t>(peer)];
  if (queue.empty()) return false;
  const Handle message = queue.front();
  RingHead& ring = segment_.ring(me_, peer);
  char* const data = segment_.ring_data(me_, peer);
  const std::uint64_t size = segment_.sizes().ring;
  std::uint64_t written = ring.written.load(std::memory_order_relaxed);  // only this side writes it
  std::uint64_t room = size - (written - ring.read.load(std::memory_order_acquire));
  const std::uint64_t before = message->done_bytes;
  if (before == 0 && room >= sizeof(Frame)) {
    write_ring(data, size, written, reinterpret_cast<const char*>(&message->frame), sizeof(Frame));
    message->done_bytes = sizeof(Frame);
    written += sizeof(Frame);
    room -= sizeof(Frame);
  }
  if (message->done_bytes > 0) {
    const std::uint64_t now = std::min({length(*message) - message->done_bytes, room, kPiece});
    if (now > 0) write_ring(data, size, written, message->data + (message->done_bytes - sizeof(Frame)), now);
    message->done_bytes += now;
    written += now;
  }
  if (message->done_bytes == before) return false;
  ring.written.store(written, std::memory_order_release);
  notify(peer);
  if (message->done_bytes == length(*message)) {
    queue.pop_front();
    finish(message);
  }
  return true;
}

// Reads the next piece from `peer`, if there is one and it has been asked for or may be put aside.
bool Mailbox::pull(int peer, bool aside) {
  Inbox& inbox = inboxes_[static_cast<std::size_t>(peer)];
  const bool opened = !inbox.current && open_frame(peer);
  if (!inbox.current) return false;
  const Handle message = inbox.current;
  if (message->data == nullptr) {
    if (!aside && message->frame.bytes > 0) return opened;
    message->aside.resize(static_cast<std::size_t>(message->frame.bytes));
  }
  RingHead& ring = segment_.ring(peer, me_);
  const std::uint64_t read = ring.read.load(std::memory_order_relaxed);  // only this side writes it
  const std::uint64_t waiting = ring.written.load(std::memory_order_acquire) - read;
  const std::uint64_t now = std::min({length(*message) - message->done_bytes, waiting, kPiece});
  char* const to = message->data != nullptr ? message->data : message->aside.data();
  if (now > 0) {
    char* const data = segment_.ring_data(peer, me_);
    read_ring(data, segment_.sizes().ring, read, to + (message->done_bytes - sizeof(Frame)), now);
    ring.read.store(read + now, std::memory_order_release);
  }
  message->done_bytes += now;
  if (now > 0 || opened) notify(peer);
  if (message->done_bytes == length(*message)) {
    inbox.current.reset();
    finish(message);
  }
  return now > 0 || opened;
}

// Makes the message whose frame comes next in the ring the current one.
bool Mailbox::open_frame(int peer) {
  RingHead& ring = segment_.ring(peer, me_);
  const std::uint64_t read = ring.read.load(std::memory_order_relaxed);
  if (ring.written.load(std::memory_order_acquire) - read < sizeof(Frame)) return false;
  Inbox& inbox = inboxes_[static_cast<std::size_t>(peer)];
  const Handle come = make_message(peer, false, 0, "", nullptr, 0);
  read_ring(segment_.ring_data(peer, me_), segment_.sizes().ring, read, reinterpret_cast<char*>(&come->frame),
            sizeof(Frame));
  ring.read.store(read + sizeof(Frame), std::memory_order_release);
  come->done_bytes = sizeof(Frame);
  inbox.current = come;
  std::deque<Handle>& asked = inbox.asked[come->frame.tag];
  if (asked.empty()) {
    inbox.unasked[come->frame.tag].push_back(come);
  } else {
    accept(asked.front(), come);
    asked.pop_front();
  }
  return true;
}

// Matches a message that has arrived, or is arriving, with the one that was asked for.
void Mailbox::accept(const Handle& asked, const Handle& come) {
  const bool alike = asked->frame.bytes == come->frame.bytes &&
                     std::strncmp(asked->frame.text, come->frame.text, sizeof(come->frame.text)) == 0;
  if (!alike) {
    asked->failure = segment_.name(come->peer) + " sent " + come->frame.text + ", but " + asked->frame.text +
                     " was expected";
    finish(asked);
    return;
  }
  if (!come->aside.empty()) std::memcpy(asked->data, come->aside.data(), come->done_bytes - sizeof(Frame));
  asked->done_bytes = come->done_bytes;
  if (come->complete) {
    finish(asked);
  } else {
    inboxes_[static_cast<std::size_t>(come->peer)].current = asked;
  }
}

void Mailbox::finish(const Handle& message) {
  message->complete = true;
  notify(me_);
}

void Mailbox::notify(int rank) {
  Word& doorbell = segment_.member(rank).doorbell;
  doorbell.value.fetch_add(1);
  wake(doorbell);
}

bool Mailbox::has_outgoing() const {
  return std::any_of(outgoing_.begin(), outgoing_.end(), [](const auto& queue) { return !queue.empty(); });
}

void Mailbox::serve() {
  Word& doorbell = segment_.member(me_).doorbell;
  std::unique_lock<std::mutex> hold(mutex_);
  while (!closing_) {
    const std::uint32_t seen = doorbell.value.load();
    progress(kNobody);
    if (!has_outgoing()) {
      work_.wait(hold, [&] { return closing_ || has_outgoing(); });
    } else {
      hold.unlock();
      sleep_while(doorbell, seen, kSleep);
      hold.lock();
    }
  }
}

}  // namespace megazero::mpu

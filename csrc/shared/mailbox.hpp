// Messages between two members, through the ring of each direction: a frame (size, tag, description), then the bytes.
// What fits into the ring is sent at once, the rest by a thread as the receiver reads. A receiver reads in order what
// comes; a message that nobody has asked for yet waits in the ring, until someone waits for one that may be behind it:
// then it is put aside.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "shared/segment.hpp"

namespace megazero::shared {

struct Frame {
  std::int64_t bytes;
  std::int64_t tag;
  char text[112];  // shape and dtype
};

// A message on its way out or in, kept alive by who waits for it and by the mailbox.
struct Message {
  Frame frame{};
  int peer = 0;
  bool outgoing = false;
  char* data = nullptr;          // where the bytes are or go; null while nobody has asked for them
  std::vector<char> aside{};     // where they go until then
  std::uint64_t done_bytes = 0;  // frame included
  std::atomic<bool> complete{false};
  std::string failure{};
};

using Handle = std::shared_ptr<Message>;

class Mailbox {
 public:
  explicit Mailbox(Segment& segment);
  ~Mailbox();

  // Notes a message for start; `data` must stay until it is complete. Throws std::runtime_error where /dev/shm is full.
  Handle send(int peer, std::int64_t tag, const std::string& text, const char* data, std::int64_t bytes);
  Handle receive(int peer, std::int64_t tag, const std::string& text, char* data, std::int64_t bytes);
  // Throws std::runtime_error if the peer is missing or sent something else than was asked for.
  void wait(const Handle& message);
  // Moves everything as far as it goes, and leaves to the thread what is still to be sent.
  void start();

 private:
  struct Inbox {
    Handle current;                                       // being read, once its frame has been
    std::map<std::int64_t, std::deque<Handle>> asked{};   // by tag, oldest first
    std::map<std::int64_t, std::deque<Handle>> unasked{};
  };

  void progress(int aside);
  bool push(int peer);
  bool pull(int peer, bool aside);
  bool open_frame(int peer);
  void accept(const Handle& asked, const Handle& come);
  void finish(const Handle& message);
  void notify(int rank);
  bool has_outgoing() const;
  void serve();

  Segment& segment_;
  int me_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::vector<std::deque<Handle>> outgoing_;
  std::vector<Inbox> inboxes_;
  std::thread thread_;
  bool closing_ = false;
};

}  // namespace megazero::shared

// Messages between two members, through one ring per direction: a frame (size, tag, description), then the bytes. What
// fits into the ring is sent at once; a thread sends the rest as the receiver reads. A receiver reads messages in the
// order in which they arrive. A message that nobody has asked for stays in the ring until someone waits for a message
// that may be behind it, and is then put aside.
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

#include "mpu/segment.hpp"

namespace megazero::mpu {

struct Frame {
  std::int64_t bytes;
  std::int64_t tag;
  char text[112];  // shape and dtype
};

// A message on its way out or in, kept alive by whoever waits for it and by the mailbox.
struct Message {
  Frame frame{};
  int peer = 0;
  bool outgoing = false;
  char* data = nullptr;          // where the bytes are or should go; null until somebody asks for them
  std::vector<char> aside{};     // holds them until then
  std::uint64_t done_bytes = 0;  // counts the frame too
  std::atomic<bool> complete{false};
  std::string failure{};
};

using Handle = std::shared_ptr<Message>;

class Mailbox {
 public:
  explicit Mailbox(Segment& segment);
  ~Mailbox();

  // Queues a message for start(); `data` must stay valid until it is complete. Throws std::runtime_error if /dev/shm is
  // full.
  Handle send(int peer, std::int64_t tag, const std::string& text, const char* data, std::int64_t bytes);
  Handle receive(int peer, std::int64_t tag, const std::string& text, char* data, std::int64_t bytes);
  // Throws std::runtime_error if the peer is missing or has sent something other than what was asked for.
  void wait(const Handle& message);
  // Moves all messages as far as possible, and leaves what is still to be sent to the thread.
  void start();

 private:
  struct Inbox {
    Handle current;                                       // the message being read, once its frame has been read
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

}  // namespace megazero::mpu

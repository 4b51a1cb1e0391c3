// Python module megazero.mpu._native: collectives between processes of one host.
//
// The bindings are thin: an address is `tensor.data_ptr()` of contiguous memory that stays valid until the call is
// done. Communication failures raise RuntimeError. Other Python threads run while a call waits or copies.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "mpu/channel.hpp"

namespace py = pybind11;
using namespace megazero::mpu;

namespace {

char* memory(std::uintptr_t address) { return reinterpret_cast<char*>(address); }

Sizes make_sizes(std::size_t members, std::int64_t slot) {
  if (members < 2 || members > kMostRanks || slot < 4096 * kMostRanks || slot % 4096) {
    throw std::invalid_argument("a group has 2 to 64 members and slots of whole pages, 256 KiB or more");
  }
  return {static_cast<int>(members), static_cast<std::size_t>(slot)};
}

// The object that Python holds. A call keeps the channel alive, so closing it meanwhile ends the call but does not
// crash the process.
class Link {
 public:
  Link(int file, int rank, const std::vector<int>& ranks, std::int64_t slot, double timeout)
      : channel_(std::make_shared<Channel>(file, rank, ranks, make_sizes(ranks.size(), slot), timeout)) {}
  ~Link() { close(); }

  void close() {
    std::shared_ptr<Channel> last = std::move(channel_);
    if (!last) return;
    last->close_down();
    py::gil_scoped_release release;
    last.reset();
  }

  // Returns the call's ticket, or 0 if it is already done.
  template <typename Call>
  std::uint64_t collective(bool later, const Call& call) const {
    const std::shared_ptr<Channel> channel = open();
    py::gil_scoped_release release;
    return channel->collective(later, call);
  }

  void wait(std::uint64_t ticket) const {
    const std::shared_ptr<Channel> channel = open();
    py::gil_scoped_release release;
    channel->queue().wait(ticket);
  }

  std::uint64_t done() const { return open()->queue().done(); }

 private:
  std::shared_ptr<Channel> open() const {
    if (!channel_) throw std::runtime_error("the group was closed");
    return channel_;
  }

  std::shared_ptr<Channel> channel_;
};

using Address = std::uintptr_t;
using Counts = std::vector<std::int64_t>;

std::uint64_t barrier(const Link& link, const std::string& text) {
  return link.collective(false, [=](Collectives& group) { group.barrier(text); });
}

std::uint64_t all_reduce(const Link& link, bool later, const std::string& text, Address data, std::int64_t elements,
                         const std::string& dtype, const std::string& reduction) {
  const Element element = element_of(dtype, reduction);
  return link.collective(later, [=](Collectives& group) { group.all_reduce(text, memory(data), elements, element); });
}

std::uint64_t all_gather(const Link& link, bool later, const std::string& text, Address output, Address input,
                         std::int64_t bytes) {
  return link.collective(
      later, [=](Collectives& group) { group.all_gather(text, memory(output), memory(input), bytes); });
}

std::uint64_t reduce_scatter(const Link& link, bool later, const std::string& text, Address output, Address input,
                             std::int64_t elements, const std::string& dtype, const std::string& reduction) {
  const Element element = element_of(dtype, reduction);
  return link.collective(later, [=](Collectives& group) {
    group.reduce_scatter(text, memory(output), memory(input), elements, element);
  });
}

std::uint64_t broadcast(const Link& link, bool later, const std::string& text, Address data, std::int64_t bytes,
                        int source) {
  return link.collective(later, [=](Collectives& group) { group.broadcast(text, memory(data), bytes, source); });
}

std::uint64_t all_to_all(const Link& link, bool later, const std::string& text, Address output, Address input,
                         const Counts& receives, const Counts& sends) {
  return link.collective(later, [=](Collectives& group) {
    group.all_to_all(text, memory(output), memory(input), receives, sends);
  });
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Communication between processes of one host through shared memory; see csrc/mpu.";
  module.attr("MOST_RANKS") = kMostRanks;
  module.def("segment_end",
             [](std::size_t members, std::int64_t slot) { return segment_end(make_sizes(members, slot)); });
  py::class_<Link>(module, "Link")
      .def(py::init<int, int, const std::vector<int>&, std::int64_t, double>(), py::arg("file"), py::arg("rank"),
           py::arg("ranks"), py::arg("slot"), py::arg("timeout"))
      .def("barrier", &barrier)
      .def("all_reduce", &all_reduce)
      .def("all_gather", &all_gather)
      .def("reduce_scatter", &reduce_scatter)
      .def("broadcast", &broadcast)
      .def("all_to_all", &all_to_all)
      .def("wait", &Link::wait)
      .def("done", &Link::done)
      .def("close", &Link::close);
}

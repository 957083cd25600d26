#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "measure/floor.hpp"
#include "measure/notified.hpp"
#include "python/handles.hpp"

namespace pgasdl {
namespace {

using namespace nb::literals;

struct FloorHandle {
  FloorHandle(const ContextHandle& context, const SegmentHandle& segment, bool oversubscribed)
      : runtime(context.runtime), floor(context.context(), segment.segment, oversubscribed) {}
  std::shared_ptr<Runtime> runtime;
  Floor floor;
};

using Times = std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>;

Times as_times(Calls calls) { return {std::move(calls.began), std::move(calls.ended)}; }

Floor::Kernel kernel(bool prefetch) {
  return prefetch ? Floor::Kernel::kPrefetch : Floor::Kernel::kPlain;
}

Floor::Copy copy_named(const std::string& wanted) {
  if (wanted == "memcpy") return Floor::Copy::kMemcpy;
  return wanted == "stream" ? Floor::Copy::kStream : Floor::Copy::kPlain;
}

}  // namespace

void bind_measure(nb::module_& module) {
  nb::class_<FloorHandle>(module, "Floor",
                          "Raw exchanges over mapped memory: what the machine itself needs. "
                          "Collective; used by pgasdl bench.")
      .def(nb::init<const ContextHandle&, const SegmentHandle&, bool>(), "context"_a, "segment"_a,
           "oversubscribed"_a)
      .def_static("bytes", &Floor::bytes, "size"_a, "payload"_a,
                  "What the segment must hold to exchange ``payload`` bytes.")
      .def(
          "sync",
          [](FloorHandle& self) {
            const WithoutGil release;
            self.floor.sync();
          },
          "A barrier of raw flags: all ranks return within one latency.")
      .def(
          "line",
          [](FloorHandle& self, std::uint32_t batches, std::uint32_t rounds) {
            const WithoutGil release;
            return self.floor.line(batches, rounds);
          },
          "batches"_a, "rounds"_a, "A bounced cache line, nanoseconds one way, per batch.")
      .def(
          "put",
          [](FloorHandle& self, std::uint64_t bytes, const std::string& copy, std::uint32_t batches,
             std::uint32_t rounds) {
            const Floor::Copy how = copy_named(copy);
            const WithoutGil release;
            return self.floor.put(bytes, how, batches, rounds);
          },
          "bytes"_a, "copy"_a, "batches"_a, "rounds"_a,
          "A copy and a flag, nanoseconds one way, per batch.")
      .def(
          "in_place",
          [](FloorHandle& self, std::uint64_t count, bool prefetch, std::uint32_t calls,
             bool paced) {
            const WithoutGil release;
            return as_times(self.floor.in_place(count, kernel(prefetch), calls, paced));
          },
          "count"_a, "prefetch"_a, "calls"_a, "paced"_a,
          "Means of float32 in the segments: when each call began and ended, nanoseconds.")
      .def(
          "private_arrays",
          [](FloorHandle& self, std::uint64_t count, std::uint64_t piece, const std::string& copy,
             std::uint32_t calls, bool paced) {
            const Floor::Copy how = copy_named(copy);
            const WithoutGil release;
            return as_times(self.floor.private_arrays(count, piece, how, calls, paced));
          },
          "count"_a, "piece"_a, "copy"_a, "calls"_a, "paced"_a,
          "Means of float32 in arrays outside the segments.")
      .def(
          "private_blocks",
          [](FloorHandle& self, std::uint64_t count, std::uint64_t piece, std::uint32_t calls,
             bool paced) {
            const WithoutGil release;
            return as_times(self.floor.private_blocks(count, piece, calls, paced));
          },
          "count"_a, "piece"_a, "calls"_a, "paced"_a, "The same, each block reduced by its owner.")
      .def(
          "layers",
          [](FloorHandle& self, const std::vector<std::uint64_t>& counts, bool prefetch,
             std::uint32_t calls, bool paced) {
            const WithoutGil release;
            return as_times(self.floor.layers(counts, kernel(prefetch), calls, paced));
          },
          "counts"_a, "prefetch"_a, "calls"_a, "paced"_a,
          "A model's tensors, one after the other, each in place.");
  module.def(
      "notified_writes",
      [](const ContextHandle& context, const SegmentHandle& segment, std::uint64_t bytes,
         std::uint64_t target, std::uint32_t batches, std::uint32_t rounds) {
        const WithoutGil release;
        return notified_writes(context.context(), segment.segment, bytes, target, batches, rounds);
      },
      "context"_a, "segment"_a, "bytes"_a, "target"_a, "batches"_a, "rounds"_a,
      "write_notify to notify_waitsome in the core, nanoseconds one way, per batch.");
  module.def(
      "socket_pings",
      [](const ContextHandle& context, int socket, std::uint64_t bytes, std::uint32_t batches,
         std::uint32_t rounds) {
        const WithoutGil release;
        return socket_pings(context.context(), socket, bytes, batches, rounds);
      },
      "context"_a, "socket"_a, "bytes"_a, "batches"_a, "rounds"_a,
      "The same over a bare socket of ranks 0 and 1, nanoseconds one way, per batch.");
  module.def(
      "streamed_writes",
      [](const ContextHandle& context, const SegmentHandle& segment, std::uint64_t bytes,
         std::uint64_t target, std::uint32_t count) {
        const WithoutGil release;
        return streamed_writes(context.context(), segment.segment, bytes, target, count);
      },
      "context"_a, "segment"_a, "bytes"_a, "target"_a, "count"_a,
      "Writes to rank 1 in a row in the core, nanoseconds each, until the queue is complete.");
  module.def("clock_cost", &clock_cost,
             "The nanoseconds that reading the clock twice adds to what lies between.");
}

}  // namespace pgasdl

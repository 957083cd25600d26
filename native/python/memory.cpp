#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "memory/device_stream.hpp"
#include "python/handles.hpp"
#include "transport/loopback/loopback.hpp"

namespace pgasdl {
namespace {

using namespace nb::literals;

// The buffer protocol: memoryview(segment), numpy.frombuffer(segment), torch.frombuffer(segment).
int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  if (!nb::inst_ready(self)) {  // its __init__ failed, or was never called
    PyErr_SetString(PyExc_BufferError, "this segment was never created");
    return -1;
  }
  const auto& handle = *nb::inst_ptr<SegmentHandle>(self);
  if (handle.segment->deleted()) {
    PyErr_Format(PyExc_BufferError, "segment %u was deleted on this rank", handle.segment->id());
    return -1;
  }
  if (handle.segment->device() != kHost) {
    PyErr_Format(PyExc_BufferError, "segment %u lies on GPU %d: the host cannot read it there",
                 handle.segment->id(), handle.segment->device());
    return -1;
  }
  return PyBuffer_FillInfo(view, self, handle.segment->local().data,
                           static_cast<Py_ssize_t>(handle.segment->bytes()), 0, flags);
}

PyType_Slot segment_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                               {0, nullptr}};

std::uint64_t bound_of(PyObject* bound, std::uint64_t missing, const Segment& segment) {
  if (bound == Py_None) return missing;
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(bound, &overflow);
  if (value == -1 && overflow == 0 && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (overflow != 0 || value < 0) {
    throw Error(ErrorKind::kSegment,
                text("slice of segment ", segment.id(),
                     ": bounds are byte offsets from 0 to 2**63 - 1, never from the end"));
  }
  return static_cast<std::uint64_t>(value);
}

SliceHandle slice_of(const SegmentHandle& handle, nb::slice slice) {
  const auto* raw = reinterpret_cast<PySliceObject*>(slice.ptr());
  if (raw->step != Py_None) {
    throw Error(ErrorKind::kSegment, "a slice of a segment is contiguous: no step");
  }
  const std::uint64_t start = bound_of(raw->start, 0, *handle.segment);
  const std::uint64_t stop = bound_of(raw->stop, handle.segment->bytes(), *handle.segment);
  if (stop < start) {
    throw Error(ErrorKind::kSegment, text("slice [", start, ":", stop, "] of segment ",
                                          handle.segment->id(), " ends before it begins"));
  }
  return {{handle.segment, start, stop - start}};
}

const RemoteSegment& remote_of(const SegmentHandle& self, Integer peer, const char* what) {
  Context& context = self.runtime->context;
  context.require_usable();
  const Rank rank = peer.rank();
  // A rank that left in peace leaves its copy as it is.
  const bool left =
      rank >= 0 && rank < context.size() && context.liveness().health(rank) == Health::kClosed;
  if (!left) context.require_peer(rank, what);
  const RemoteSegment* remote = self.segment->remote(rank);
  if (remote == nullptr) {
    throw Error(ErrorKind::kRank,
                text("rank ", peer.value, " has no copy of segment ", self.segment->id()));
  }
  return *remote;
}

void create(SegmentHandle* self, const GroupHandle& group, Integer bytes, Integer notifications,
            std::uintptr_t bound, std::optional<double> timeout, int device) {
  Context& context = group.runtime->context;
  if (bytes.value < 0) {
    throw Error(ErrorKind::kSegment, text("a segment of ", bytes.value, " bytes"));
  }
  if (notifications.natural() > kMaxNotifications) {
    throw Error(ErrorKind::kNotification,
                text(notifications.value, " notifications: 0 to ", kMaxNotifications));
  }
  const double limit = seconds(context, timeout);
  const Group::Inside inside(*group.group, Group::Kind::kExchange, "segment");
  std::shared_ptr<Segment> segment;
  const auto attempt = [&](Deadline deadline) {
    return group.group->create_segment(
        inside, bytes.natural(), static_cast<std::uint32_t>(notifications.value),
        {reinterpret_cast<std::byte*>(bound), device}, deadline, segment);
  };
  Outcome outcome;
  {
    // Handing the memory to many peers may take a while.
    const WithoutGil release;
    outcome = attempt(Deadline::once());
  }
  if (outcome != Outcome::kDone) outcome = blocking(limit, attempt);
  if (outcome != Outcome::kDone) {
    raise("PgasTimeoutError",
          group.group->missing_in_allgather(Group::Kind::kExchange, "creating a segment"));
  }
  new (self) SegmentHandle{group.runtime, std::move(segment)};
}

}  // namespace

SliceArgument::SliceArgument(nb::handle given) : given_(given) {
  if (nb::isinstance<SliceHandle>(given)) slice_ = &nb::inst_ptr<SliceHandle>(given)->slice;
}

const Slice& SliceArgument::refuse() const {
  const char* const how = nb::isinstance<SegmentHandle>(given_)
                              ? "take a slice of it: segment[0:n]"
                              : "copy the data into a segment and take segment[0:n], or bind an "
                                "array by ctx.bind(array)";
  PyErr_Format(PyExc_TypeError, "a slice of a segment is expected here, not '%s': %s",
               Py_TYPE(given_.ptr())->tp_name, how);
  throw nb::python_error();
}

void bind_memory(nb::module_& module) {
  nb::class_<SliceHandle>(module, "Slice",
                          "n bytes of a segment: of this rank's copy as a source, of a peer's as a "
                          "target. Made by ``segment[start:stop]``; checked when it is used.")
      .def_prop_ro("offset", [](const SliceHandle& self) { return self.slice.offset; })
      .def_prop_ro("nbytes", [](const SliceHandle& self) { return self.slice.bytes; })
      .def_prop_ro("segment_id", [](const SliceHandle& self) { return self.slice.segment->id(); })
      .def("__repr__", [](const SliceHandle& self) {
        return text("<Slice [", self.slice.offset, ":", self.slice.offset + self.slice.bytes,
                    "] of segment ", self.slice.segment->id(), ">");
      });

  nb::class_<SegmentHandle>(module, "SegmentCore", nb::type_slots(segment_slots),
                            "Memory that every rank of a group can write to; see pgasdl.Segment.")
      .def("__init__", &create, "group"_a, "nbytes"_a, "notifications"_a, "bound"_a,
           "timeout"_a.none(), "device"_a = kHost)
      .def_prop_ro(
          "id", [](const SegmentHandle& self) { return self.segment->id(); },
          "Number of the segment, the same on every member.")
      .def_prop_ro(
          "nbytes", [](const SegmentHandle& self) { return self.segment->bytes(); },
          "Bytes of this rank's copy.")
      .def_prop_ro(
          "notifications", [](const SegmentHandle& self) { return self.segment->notifications(); },
          "Number of notifications of this rank's copy.")
      .def_prop_ro(
          "bound", [](const SegmentHandle& self) { return self.segment->bound(); },
          "Whether the memory was allocated elsewhere (:meth:`Context.bind`).")
      .def_prop_ro(
          "device_number", [](const SegmentHandle& self) { return self.segment->device(); },
          "The GPU that the memory lies on; -1: none, it is the host's.")
      .def_prop_ro(
          "deleted", [](const SegmentHandle& self) { return self.segment->deleted(); },
          "Whether this rank's copy was given up.")
      .def_prop_ro(
          "address",
          [](const SegmentHandle& self) {
            return reinterpret_cast<std::uintptr_t>(self.segment->local().data);
          },
          "Where this rank's copy begins in its memory.")
      .def(
          "nbytes_of",
          [](const SegmentHandle& self, Integer peer) {
            return remote_of(self, peer, "nbytes_of").bytes;
          },
          "peer"_a, "Return the bytes of ``peer``'s copy.")
      .def(
          "address_of",
          [](const SegmentHandle& self, Integer peer) {
            return reinterpret_cast<std::uintptr_t>(remote_of(self, peer, "address_of").data);
          },
          "peer"_a,
          "Where ``peer``'s copy begins in this process's memory; 0 if it is not mapped here.")
      .def(
          "prefault",
          [](const SegmentHandle& self) {
            const WithoutGil release;
            if (self.segment->device() != kHost) return;
            prefault(self.segment->local().data, self.segment->bytes());
            for (Rank peer = 0; peer < self.runtime->context.size(); ++peer) {
              const RemoteSegment* remote = self.segment->remote(peer);
              if (remote != nullptr && remote->data != nullptr) {
                prefault(remote->data, remote->bytes);
              }
            }
          },
          "Make the pages of all copies that are mapped here present now; changes nothing.")
      .def(
          "pin",
          [](const SegmentHandle& self, std::optional<int> device) {
            const LocalSegment& local = self.segment->local();
            // MPI pins the memory that it allocated for a window.
            const bool ours = local.region != nullptr && local.data == local.region->data();
            if (!ours || self.segment->deleted()) return false;
            const WithoutGil release;
            local.region->pin(device.value_or(0));
            return true;
          },
          "device"_a = nb::none(),
          "Register this rank's copy, on the host, with the GPU's driver: copies between it and a "
          "GPU are then faster, and streams make them without the host. device: the number of a "
          "GPU that this process uses, None: the first; the others reach it, too. It lasts as long "
          "as the memory. "
          "False, and nothing is done: the memory is not the library's own (bound, a "
          "GPU's, "
          "MPI's). UnavailableError without a GPU. CaffeGPI, gaspi_segment_use of pinned memory.")
      .def("__getitem__", &slice_of, "slice"_a)
      .def(
          "delete",
          [](const SegmentHandle& self) {
            Group::delete_segment(self.runtime->context, *self.segment);
          },
          "Give this rank's copy up. Peers' copies stay reachable; views keep their memory.");

  module.def(
      "local_memory",
      [](const ContextHandle& context, std::uintptr_t address, std::uint64_t bytes, int device) {
        return SegmentHandle{
            context.runtime,
            std::make_shared<Segment>(reinterpret_cast<std::byte*>(address), bytes, device)};
      },
      "context"_a, "address"_a, "nbytes"_a, "device"_a = kHost,
      "Memory of this rank alone, as a plan's private buffer; the caller keeps it alive.");

  module.def(
      "device_copy",
      [](std::uintptr_t to, std::uintptr_t from, std::uint64_t bytes, int device,
         std::uintptr_t stream) {
        const WithoutGil release;
        device_copy({device, reinterpret_cast<cuda::Stream>(stream)}, reinterpret_cast<void*>(to),
                    reinterpret_cast<const void*>(from), bytes);
      },
      "to"_a, "source"_a, "nbytes"_a, "device"_a, "stream"_a,
      "Copy between addresses of host and GPUs on a stream, and wait for it.");

  nb::class_<LoopbackWorld>(module, "LoopbackWorld",
                            "What ranks that are threads of one process share.")
      .def(
          "__init__",
          [](LoopbackWorld* self, Rank size, std::uint64_t seed, std::uint32_t delay, bool reorder,
             bool late_source, std::uint32_t refuse, std::int32_t fail_rank, std::uint64_t fail_at,
             bool mapped, bool any_order, bool completion_first) {
            new (self) LoopbackWorld(size, {.seed = seed,
                                            .delay = delay,
                                            .reorder = reorder,
                                            .late_source = late_source,
                                            .refuse = refuse,
                                            .fail_rank = fail_rank,
                                            .fail_at = fail_at,
                                            .mapped = mapped,
                                            .any_order = any_order,
                                            .completion_first = completion_first});
          },
          "size"_a, "seed"_a = 0, "delay"_a = 0, "reorder"_a = false, "late_source"_a = false,
          "refuse"_a = 0, "fail_rank"_a = -1, "fail_at"_a = 0, "mapped"_a = true,
          "any_order"_a = false, "completion_first"_a = false)
      .def_prop_ro("size", &LoopbackWorld::size);
}

}  // namespace pgasdl

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

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

void create(SegmentHandle* self, const GroupHandle& group, Integer bytes, Integer notifications,
            std::uintptr_t bound, std::optional<double> timeout) {
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
    return group.group->create_segment(inside, bytes.natural(),
                                       static_cast<std::uint32_t>(notifications.value),
                                       reinterpret_cast<std::byte*>(bound), deadline, segment);
  };
  Outcome outcome;
  {
    // Handing the memory to many peers may take a while.
    const nb::gil_scoped_release release;
    outcome = attempt(Deadline::once());
  }
  if (outcome != Outcome::kDone) outcome = blocking(limit, attempt);
  if (outcome != Outcome::kDone) {
    raise("Timeout",
          "creating a segment: " + group.group->missing_in_allgather(Group::Kind::kExchange));
  }
  new (self) SegmentHandle{group.runtime, std::move(segment)};
}

}  // namespace

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
           "timeout"_a.none())
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
            self.runtime->context.require_peer(peer.rank(), "nbytes_of");
            const RemoteSegment* remote = self.segment->remote(peer.rank());
            if (remote == nullptr) {
              throw Error(ErrorKind::kRank, text("rank ", peer.value, " has no copy of segment ",
                                                 self.segment->id()));
            }
            return remote->bytes;
          },
          "peer"_a, "Return the bytes of ``peer``'s copy.")
      .def(
          "prefault",
          [](const SegmentHandle& self) {
            const nb::gil_scoped_release release;
            prefault(self.segment->local().data, self.segment->bytes());
            for (Rank peer = 0; peer < self.runtime->context.size(); ++peer) {
              const RemoteSegment* remote = self.segment->remote(peer);
              if (remote != nullptr && remote->data != nullptr) {
                prefault(remote->data, remote->bytes);
              }
            }
          },
          "Make the pages of all copies that are mapped here present now; changes nothing.")
      .def("__getitem__", &slice_of, "slice"_a)
      .def(
          "delete",
          [](const SegmentHandle& self) {
            Group::delete_segment(self.runtime->context, *self.segment);
          },
          "Give this rank's copy up. Peers' copies stay reachable; views keep their memory.");

  module.def(
      "local_memory",
      [](const ContextHandle& context, std::uintptr_t address, std::uint64_t bytes) {
        return SegmentHandle{context.runtime, std::make_shared<Segment>(
                                                  reinterpret_cast<std::byte*>(address), bytes)};
      },
      "context"_a, "address"_a, "nbytes"_a,
      "Memory of this rank alone, as a plan's private buffer; the caller keeps it alive.");

  nb::class_<LoopbackWorld>(module, "LoopbackWorld",
                            "What ranks that are threads of one process share.")
      .def(
          "__init__",
          [](LoopbackWorld* self, Rank size, std::uint64_t seed, std::uint32_t delay, bool reorder,
             bool late_source, std::uint32_t refuse, std::int32_t fail_rank, std::uint64_t fail_at,
             bool mapped) {
            new (self) LoopbackWorld(
                size, {seed, delay, reorder, late_source, refuse, fail_rank, fail_at, mapped});
          },
          "size"_a, "seed"_a = 0, "delay"_a = 0, "reorder"_a = false, "late_source"_a = false,
          "refuse"_a = 0, "fail_rank"_a = -1, "fail_at"_a = 0, "mapped"_a = true)
      .def_prop_ro("size", &LoopbackWorld::size);
}

}  // namespace pgasdl

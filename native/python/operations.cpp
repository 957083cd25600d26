// The one-sided operations of a context, and its queues.
#include <nanobind/stl/optional.h>

#include <algorithm>

#include "pgas/board.hpp"
#include "python/direct_calls.hpp"
#include "python/docs.hpp"
#include "python/handles.hpp"

namespace pgasdl {

// An id, or a range of ids with its number.
struct Ids {
  std::uint64_t first = 0;
  std::optional<std::uint64_t> number;
};

}  // namespace pgasdl

namespace nanobind::detail {
template <>
struct type_caster<pgasdl::Ids> {
  NB_TYPE_CASTER(pgasdl::Ids, const_name("int | range"))
  // Ranges with a step are no range of ids.
  bool from_python(handle source, std::uint8_t flags, cleanup_list* cleanup) noexcept {
    const auto natural = [&](const char* name, std::uint64_t& result) {
      PyObject* const bound = PyObject_GetAttrString(source.ptr(), name);
      make_caster<pgasdl::Integer> integer;
      const bool right = bound != nullptr && integer.from_python(bound, flags, cleanup);
      if (bound == nullptr) PyErr_Clear();
      Py_XDECREF(bound);
      if (right) result = integer.value.natural();
      return right;
    };
    if (PyRange_Check(source.ptr())) {
      std::uint64_t step = 0;
      std::uint64_t end = 0;
      if (!natural("step", step) || step != 1 || !natural("start", value.first) ||
          !natural("stop", end)) {
        return false;
      }
      value.number = end > value.first ? end - value.first : value.first == UINT64_MAX ? 1 : 0;
      return true;
    }
    make_caster<pgasdl::Integer> integer;
    if (!integer.from_python(source, flags, cleanup)) return false;
    value = {integer.value.natural(), std::nullopt};
    return true;
  }
};
}  // namespace nanobind::detail

namespace pgasdl {
namespace {

using namespace nb::literals;

// Posts of this size or more copy without the GIL.
constexpr std::uint64_t kBytesWithoutGil = 64 << 10;

// Lists of (local, remote) slices; the tuples keep the slices alive meanwhile.
std::vector<Pair> pairs_of(const nb::sequence& list) {
  std::vector<Pair> pairs;
  pairs.reserve(nb::len(list));
  for (nb::handle item : list) {
    if (!PyTuple_Check(item.ptr()) || PyTuple_GET_SIZE(item.ptr()) != 2) {
      throw Error(ErrorKind::kBuffer, "a list operation takes pairs (mine, theirs) of slices");
    }
    const nb::handle mine(PyTuple_GET_ITEM(item.ptr(), 0));
    const nb::handle theirs(PyTuple_GET_ITEM(item.ptr(), 1));
    if (!nb::isinstance<SliceHandle>(mine) || !nb::isinstance<SliceHandle>(theirs)) {
      throw Error(ErrorKind::kBuffer, "a list operation takes pairs (mine, theirs) of slices");
    }
    pairs.push_back(
        {&nb::inst_ptr<SliceHandle>(mine)->slice, &nb::inst_ptr<SliceHandle>(theirs)->slice});
  }
  return pairs;
}

// The cost of posting a list, in bytes copied; a long list may also wait for room.
std::uint64_t weight_of(std::span<const Pair> pairs) {
  constexpr std::uint64_t kRequest = 1 << 10;
  std::uint64_t weight = 0;
  for (const Pair& pair : pairs) weight += pair.local->bytes + kRequest;
  return weight;
}

void require_posted(const ContextHandle& self, Outcome outcome, Integer queue) {
  if (outcome == Outcome::kDone) return;
  raise("QueueFullError",
        text("queue ", queue.value, " holds ", self.context().options().queue_depth,
             " requests; nothing was posted: wait(", queue.value,
             "), then post again, or use another queue"));
}

// Posts; long copies, and waits for a free place, run without the GIL.
template <typename Post>
void post(const ContextHandle& self, std::uint64_t weight, Integer peer, Integer queue,
          std::optional<double> timeout, Post&& attempt) {
  const double limit = seconds(self.context(), timeout);
  Outcome outcome;
  if (weight < kBytesWithoutGil) {
    outcome = blocking(limit, attempt);
  } else {
    {
      const WithoutGil release;
      outcome = attempt(Deadline::once());
    }
    if (outcome != Outcome::kDone) outcome = blocking(limit, attempt);
  }
  if (outcome == Outcome::kConnecting) {
    // The first request to a peer makes the connection, which a single try includes.
    const double patience = limit > 0 ? limit : self.context().options().timeout;
    if (limit == 0) outcome = blocking(patience, attempt);
    if (outcome == Outcome::kConnecting) {
      raise("PgasTimeoutError", text("rank ", peer.value,
                                     " has not answered a request for a connection on "
                                     "queue ",
                                     queue.value, " for ", patience, " s; nothing was posted"));
    }
  }
  require_posted(self, outcome, queue);
}

// A GPU that takes part, or kHost.
int device_of(std::span<const Pair> pairs, Rank peer) {
  for (const Pair& pair : pairs) {
    if (!pair.local->segment->on_devices() && !pair.remote->segment->on_devices()) [[likely]]
      continue;
    if (pair.local->segment->device() != kHost) return pair.local->segment->device();
    const RemoteSegment* remote = pair.remote->segment->remote(peer);
    if (remote != nullptr && remote->device >= 0) return remote->device;
  }
  return kHost;
}

// `stream`: as users name streams; None: the current one of PyTorch or CuPy.
StreamOrder order_of(const ContextHandle& self, nb::handle stream, int device) {
  const nb::object named = self.runtime->stream_handle(stream, device);
  return {device, reinterpret_cast<cuda::Stream>(nb::cast<std::uintptr_t>(named))};
}

void synchronize(const StreamOrder& order) {
  const WithoutGil release;
  const cuda::Current current(order.device);
  cuda::check(cuda::driver().stream_synchronize(order.stream), "waiting for a stream");
}

// Orders copies of a GPU's bytes after the work that the program has enqueued there.
void follow_current_stream(const ContextHandle& self, std::span<const Pair> pairs, Rank peer) {
  const int device = device_of(pairs, peer);
  if (device == kHost) [[likely]]
    return;
  synchronize(order_of(self, nb::none(), device));
}

int require_device(const Segment& segment) {
  if (segment.device() == kHost) {
    throw Error(ErrorKind::kUnavailable,
                text("a stream orders what is on a GPU: segment ", segment.id(), " is not"));
  }
  return segment.device();
}

// True: enqueued on the stream; false: peers' memory is not mapped here, and the stream has done
// all its work, so the host can post.
bool enqueue(const ContextHandle& self, nb::handle stream, std::span<const Pair> pairs, Rank peer,
             const std::shared_ptr<Segment>& segment, Integer notification, Integer value,
             Integer queue, std::optional<double> timeout) {
  int device = device_of(pairs, peer);
  if (device == kHost) device = require_device(*segment);
  const StreamOrder order = order_of(self, stream, device);
  bool mapped = true;
  const auto attempt = [&](Deadline deadline) {
    const auto outcome =
        self.context().write_notify_on(order, pairs, peer, segment, notification.natural(),
                                       value.natural(), queue.queue(), deadline);
    mapped = outcome.has_value();
    return outcome.value_or(Outcome::kDone);
  };
  const Outcome outcome = blocking(seconds(self.context(), timeout), attempt);
  if (mapped) {
    require_posted(self, outcome, queue);
    return true;
  }
  synchronize(order);
  return false;
}

void write(const ContextHandle& self, const SliceArgument& source, Integer peer,
           const SliceArgument& target, Integer queue, std::optional<double> timeout) {
  const Pair pair{&*source, &*target};
  follow_current_stream(self, {&pair, 1}, peer.rank());
  post(self, source->bytes, peer, queue, timeout, [&](Deadline deadline) {
    return self.context().write({&pair, 1}, peer.rank(), queue.queue(), deadline);
  });
}

void read(const ContextHandle& self, const SliceArgument& target, Integer peer,
          const SliceArgument& source, Integer queue, std::optional<double> timeout) {
  const Pair pair{&*target, &*source};
  follow_current_stream(self, {&pair, 1}, peer.rank());
  post(self, target->bytes, peer, queue, timeout, [&](Deadline deadline) {
    return self.context().read({&pair, 1}, peer.rank(), queue.queue(), deadline);
  });
}

void write_list(const ContextHandle& self, const nb::sequence& list, Integer peer, Integer queue,
                std::optional<double> timeout) {
  const auto pairs = pairs_of(list);
  follow_current_stream(self, pairs, peer.rank());
  post(self, weight_of(pairs), peer, queue, timeout, [&](Deadline deadline) {
    return self.context().write(pairs, peer.rank(), queue.queue(), deadline);
  });
}

void read_list(const ContextHandle& self, const nb::sequence& list, Integer peer, Integer queue,
               std::optional<double> timeout) {
  const auto pairs = pairs_of(list);
  follow_current_stream(self, pairs, peer.rank());
  post(self, weight_of(pairs), peer, queue, timeout, [&](Deadline deadline) {
    return self.context().read(pairs, peer.rank(), queue.queue(), deadline);
  });
}

void post_notify(const ContextHandle& self, std::span<const Pair> pairs, std::uint64_t weight,
                 Integer peer, const std::shared_ptr<Segment>& segment, Integer notification,
                 Integer value, Integer queue, std::optional<double> timeout) {
  post(self, weight, peer, queue, timeout, [&](Deadline deadline) {
    return self.context().write_notify(pairs, peer.rank(), *segment, notification.natural(),
                                       value.natural(), queue.queue(), deadline);
  });
}

void notify(const ContextHandle& self, Integer peer, const SegmentHandle& segment,
            Integer notification, Integer value, Integer queue, std::optional<double> timeout) {
  post_notify(self, {}, 0, peer, segment.segment, notification, value, queue, timeout);
}

void notify_on(const ContextHandle& self, nb::handle stream, Integer peer,
               const SegmentHandle& segment, Integer notification, Integer value, Integer queue,
               std::optional<double> timeout) {
  const std::shared_ptr<Segment>& board = segment.segment;
  if (enqueue(self, stream, {}, peer.rank(), board, notification, value, queue, timeout)) return;
  post_notify(self, {}, 0, peer, board, notification, value, queue, timeout);
}

void write_notify(const ContextHandle& self, const SliceArgument& source, Integer peer,
                  const SliceArgument& target, Integer notification, Integer value, Integer queue,
                  std::optional<double> timeout) {
  const Pair pair{&*source, &*target};
  const std::shared_ptr<Segment>& board = target->segment;
  if (device_of({&pair, 1}, peer.rank()) != kHost &&
      enqueue(self, nb::none(), {&pair, 1}, peer.rank(), board, notification, value, queue,
              timeout)) {
    return;
  }
  post_notify(self, {&pair, 1}, source->bytes, peer, board, notification, value, queue, timeout);
}

void write_notify_on(const ContextHandle& self, nb::handle stream, const SliceArgument& source,
                     Integer peer, const SliceArgument& target, Integer notification, Integer value,
                     Integer queue, std::optional<double> timeout) {
  const Pair pair{&*source, &*target};
  const std::shared_ptr<Segment>& board = target->segment;
  if (enqueue(self, stream, {&pair, 1}, peer.rank(), board, notification, value, queue, timeout)) {
    return;
  }
  post_notify(self, {&pair, 1}, source->bytes, peer, board, notification, value, queue, timeout);
}

void write_list_notify(const ContextHandle& self, const nb::sequence& list, Integer peer,
                       const SegmentHandle& segment, Integer notification, Integer value,
                       Integer queue, std::optional<double> timeout) {
  const auto pairs = pairs_of(list);
  const std::shared_ptr<Segment>& board = segment.segment;
  if (device_of(pairs, peer.rank()) != kHost &&
      enqueue(self, nb::none(), pairs, peer.rank(), board, notification, value, queue, timeout)) {
    return;
  }
  post_notify(self, pairs, weight_of(pairs), peer, board, notification, value, queue, timeout);
}

void write_list_notify_on(const ContextHandle& self, nb::handle stream, const nb::sequence& list,
                          Integer peer, const SegmentHandle& segment, Integer notification,
                          Integer value, Integer queue, std::optional<double> timeout) {
  const auto pairs = pairs_of(list);
  const std::shared_ptr<Segment>& board = segment.segment;
  if (enqueue(self, stream, pairs, peer.rank(), board, notification, value, queue, timeout)) return;
  post_notify(self, pairs, weight_of(pairs), peer, board, notification, value, queue, timeout);
}

void read_notify(const ContextHandle& self, const SliceArgument& target, Integer peer,
                 const SliceArgument& source, Integer notification, Integer value, Integer queue,
                 std::optional<double> timeout) {
  const Pair pair{&*target, &*source};
  follow_current_stream(self, {&pair, 1}, peer.rank());
  post(self, target->bytes, peer, queue, timeout, [&](Deadline deadline) {
    return self.context().read_notify({&pair, 1}, peer.rank(), *target->segment,
                                      notification.natural(), value.natural(), queue.queue(),
                                      deadline);
  });
}

void read_list_notify(const ContextHandle& self, const nb::sequence& list, Integer peer,
                      const SegmentHandle& segment, Integer notification, Integer value,
                      Integer queue, std::optional<double> timeout) {
  const auto pairs = pairs_of(list);
  follow_current_stream(self, pairs, peer.rank());
  post(self, weight_of(pairs), peer, queue, timeout, [&](Deadline deadline) {
    return self.context().read_notify(pairs, peer.rank(), *segment.segment, notification.natural(),
                                      value.natural(), queue.queue(), deadline);
  });
}

// A GPU cannot add to a flag, so this waits for the current stream first.
void post_add(const ContextHandle& self, std::span<const Pair> pairs, std::uint64_t weight,
              Integer peer, const std::shared_ptr<Segment>& segment, Integer notification,
              Integer value, Integer queue, std::optional<double> timeout) {
  follow_current_stream(self, pairs, peer.rank());
  post(self, weight, peer, queue, timeout, [&](Deadline deadline) {
    return self.context().write_notify_add(pairs, peer.rank(), *segment, notification.natural(),
                                           value.natural(), queue.queue(), deadline);
  });
}

void notify_add(const ContextHandle& self, Integer peer, const SegmentHandle& segment,
                Integer notification, Integer value, Integer queue, std::optional<double> timeout) {
  post_add(self, {}, 0, peer, segment.segment, notification, value, queue, timeout);
}

void write_notify_add(const ContextHandle& self, const SliceArgument& source, Integer peer,
                      const SliceArgument& target, Integer notification, Integer value,
                      Integer queue, std::optional<double> timeout) {
  const Pair pair{&*source, &*target};
  post_add(self, {&pair, 1}, source->bytes, peer, target->segment, notification, value, queue,
           timeout);
}

void write_list_notify_add(const ContextHandle& self, const nb::sequence& list, Integer peer,
                           const SegmentHandle& segment, Integer notification, Integer value,
                           Integer queue, std::optional<double> timeout) {
  const auto pairs = pairs_of(list);
  post_add(self, pairs, weight_of(pairs), peer, segment.segment, notification, value, queue,
           timeout);
}

void wait(const ContextHandle& self, Integer queue, std::optional<double> timeout) {
  Context& context = self.context();
  if (blocking(seconds(context, timeout), [&](Deadline deadline) {
        return context.wait(queue.queue(), deadline);
      }) != Outcome::kDone) {
    raise("PgasTimeoutError", text("wait: queue ", queue.value, " still holds requests after ",
                                   seconds(context, timeout), " s"));
  }
}

// "; 7 is raised": a notification that the program may have meant.
std::string raised_elsewhere(Segment& segment, std::uint64_t begin, std::uint64_t number) {
  const auto end = static_cast<std::uint32_t>(begin + number);
  const FlagWord* const board = segment.local().board;
  const std::uint32_t limit = segment.notifications();
  std::uint32_t found = 0;
  if (find_raised(board, limit, 0, static_cast<std::uint32_t>(begin), found) ||
      find_raised(board, limit, end, limit, found)) {
    return text("; ", found, " is raised");
  }
  return "";
}

std::optional<std::uint32_t> wait_for_some(const ContextHandle& self, const SegmentHandle& segment,
                                           std::uint64_t begin, std::uint64_t number,
                                           std::optional<double> timeout) {
  Context& context = self.context();
  if (number == 0) return std::nullopt;
  std::uint32_t found = 0;
  if (blocking(seconds(context, timeout), [&](Deadline deadline) {
        return context.notify_waitsome(*segment.segment, begin, number, deadline, found);
      }) != Outcome::kDone) {
    raise("PgasTimeoutError",
          text("notify_waitsome: none of notifications ", begin, " to ", begin + number - 1,
               " of segment ", segment.segment->id(), " was raised on rank ", context.rank(),
               " within ", seconds(context, timeout), " s",
               raised_elsewhere(*segment.segment, begin, number),
               context.liveness().waits_of_others()));
  }
  return found;
}

std::optional<std::uint32_t> notify_waitsome(const ContextHandle& self,
                                             const SegmentHandle& segment, std::optional<Ids> first,
                                             std::optional<Integer> count,
                                             std::optional<double> timeout) {
  const Ids ids = first.value_or(Ids{});
  if (ids.number && count) {
    throw Error(ErrorKind::kNotification,
                "notify_waitsome: a range says itself how many ids; leave out the count");
  }
  const std::uint64_t all = segment.segment->notifications();
  const std::uint64_t rest = all - std::min(ids.first, all);
  if (first && !ids.number && !count &&
      PyErr_WarnEx(PyExc_DeprecationWarning,
                   "notify_waitsome(segment, first) waits for `first` and all ids above: write "
                   "range(first, segment.notifications), or (segment, first, 1) for that id alone",
                   1) != 0) {
    throw nb::python_error();
  }
  return wait_for_some(self, segment, ids.first,
                       count ? count->natural() : ids.number.value_or(rest), timeout);
}

void notify_wait_on(const ContextHandle& self, nb::handle stream, const SegmentHandle& segment,
                    Integer notification, std::optional<double> timeout) {
  Context& context = self.context();
  const StreamOrder order = order_of(self, stream, require_device(*segment.segment));
  if (context.transport().needs_progress() && segment.segment->reached()) {
    // A processor raises the flags there, so the host waits, after the stream's earlier work.
    refuse_capture(order, kStreamWait);
    synchronize(order);
    wait_for_some(self, segment, notification.natural(), 1, timeout);
  }
  context.notify_wait_on(order, segment.segment, notification.natural(),
                         Deadline::in(seconds(context, timeout)));
}

std::uint32_t notify_wait_count(const ContextHandle& self, const SegmentHandle& segment,
                                Integer notification, Integer count,
                                std::optional<double> timeout) {
  Context& context = self.context();
  std::uint32_t left = 0;
  if (blocking(seconds(context, timeout), [&](Deadline deadline) {
        return context.notify_wait_count(*segment.segment, notification.natural(), count.natural(),
                                         deadline, left);
      }) != Outcome::kDone) {
    raise("PgasTimeoutError",
          text("notify_wait_count: notification ", notification.value, " of segment ",
               segment.segment->id(), " stands at ", left, " of ", count.value, " on rank ",
               context.rank(), " after ", seconds(context, timeout), " s",
               context.liveness().waits_of_others()));
  }
  return left;
}

std::uint32_t notify_reset(const ContextHandle& self, const SegmentHandle& segment,
                           Integer notification) {
  return self.context().notify_reset(*segment.segment, notification.natural());
}

std::int64_t atomic(const ContextHandle& self, Atomic::Kind kind, const SliceArgument& target,
                    Integer peer, std::uint64_t operand, std::uint64_t compare,
                    std::optional<double> timeout) {
  Context& context = self.context();
  std::uint64_t old = 0;
  const double limit = seconds(context, timeout);
  Outcome outcome;
  {
    const WithoutGil release;
    outcome =
        context.atomic(kind, *target, peer.rank(), operand, compare, Deadline::in(limit), old);
  }
  if (outcome != Outcome::kDone) {
    raise("PgasTimeoutError",
          text("an atomic on rank ", peer.value, " did not complete within ", limit, " s"));
  }
  return static_cast<std::int64_t>(old);
}

// --- calls with only positional arguments

PyObject* none() { return Py_NewRef(Py_None); }

// notify(peer, segment, notification, value)
PyObject* notify_directly(PyObject* const* given, std::size_t n, bool& other) {
  if (n == 4 || n == 5) {
    const auto* self = direct<ContextHandle>(given[0]);
    const auto* segment = direct<SegmentHandle>(given[2]);
    Integer peer, notification, value{1};
    if (self != nullptr && segment != nullptr && direct(given[1], peer) &&
        direct(given[3], notification) && (n == 4 || direct(given[4], value))) {
      notify(*self, peer, *segment, notification, value, Integer{0}, std::nullopt);
      return none();
    }
  }
  other = true;
  return nullptr;
}

// write_notify(source, peer, target, notification, value)
PyObject* write_notify_directly(PyObject* const* given, std::size_t n, bool& other) {
  if (n == 5 || n == 6) {
    const auto* self = direct<ContextHandle>(given[0]);
    const auto* source = direct<SliceHandle>(given[1]);
    const auto* target = direct<SliceHandle>(given[3]);
    Integer peer, notification, value{1};
    if (self != nullptr && source != nullptr && target != nullptr && direct(given[2], peer) &&
        direct(given[4], notification) && (n == 5 || direct(given[5], value))) {
      const Pair pair{&source->slice, &target->slice};
      const bool brief = source->slice.bytes < kBytesWithoutGil;
      if (!brief || device_of({&pair, 1}, peer.rank()) != kHost ||
          self->context().write_notify({&pair, 1}, peer.rank(), *target->slice.segment,
                                       notification.natural(), value.natural(), 0,
                                       Deadline::once()) != Outcome::kDone) {
        write_notify(*self, SliceArgument(source->slice), peer, SliceArgument(target->slice),
                     notification, value, Integer{0}, std::nullopt);
      }
      return none();
    }
  }
  other = true;
  return nullptr;
}

// notify_waitsome(segment) and notify_waitsome(segment, first, count)
PyObject* notify_waitsome_directly(PyObject* const* given, std::size_t n, bool& other) {
  if (n == 2 || n == 4) {
    const auto* self = direct<ContextHandle>(given[0]);
    const auto* segment = direct<SegmentHandle>(given[1]);
    Integer first, count;
    if (self != nullptr && segment != nullptr &&
        (n == 2 || (direct(given[2], first) && direct(given[3], count)))) {
      const std::uint64_t number = n == 2 ? segment->segment->notifications() : count.natural();
      const auto found = wait_for_some(*self, *segment, first.natural(), number, std::nullopt);
      return found ? PyLong_FromUnsignedLong(*found) : none();
    }
  }
  other = true;
  return nullptr;
}

// notify_reset(segment, notification)
PyObject* notify_reset_directly(PyObject* const* given, std::size_t n, bool& other) {
  if (n == 3) {
    const auto* self = direct<ContextHandle>(given[0]);
    const auto* segment = direct<SegmentHandle>(given[1]);
    Integer notification;
    if (self != nullptr && segment != nullptr && direct(given[2], notification)) {
      return PyLong_FromUnsignedLong(notify_reset(*self, *segment, notification));
    }
  }
  other = true;
  return nullptr;
}

}  // namespace

void bind_operations(nb::class_<ContextHandle>& context) {
  context
      .def("write", &write, "source"_a, "peer"_a, "target"_a, nb::kw_only(), "queue"_a = Integer{0},
           "timeout"_a.none() = nb::none(), docs::kWrite)
      .def("read", &read, "target"_a, "peer"_a, "source"_a, nb::kw_only(), "queue"_a = Integer{0},
           "timeout"_a.none() = nb::none(), docs::kRead)
      .def("write_list", &write_list, "pairs"_a, "peer"_a, nb::kw_only(), "queue"_a = Integer{0},
           "timeout"_a.none() = nb::none(), docs::kWriteList)
      .def("read_list", &read_list, "pairs"_a, "peer"_a, nb::kw_only(), "queue"_a = Integer{0},
           "timeout"_a.none() = nb::none(), docs::kReadList)
      .def("notify", &notify, "peer"_a, "segment"_a, "notification"_a, "value"_a = Integer{1},
           nb::kw_only(), "queue"_a = Integer{0}, "timeout"_a.none() = nb::none(), docs::kNotify)
      .def("write_notify", &write_notify, "source"_a, "peer"_a, "target"_a, "notification"_a,
           "value"_a = Integer{1}, nb::kw_only(), "queue"_a = Integer{0},
           "timeout"_a.none() = nb::none(), docs::kWriteNotify)
      .def("write_list_notify", &write_list_notify, "pairs"_a, "peer"_a, "segment"_a,
           "notification"_a, "value"_a = Integer{1}, nb::kw_only(), "queue"_a = Integer{0},
           "timeout"_a.none() = nb::none(), docs::kWriteListNotify)
      .def("read_notify", &read_notify, "target"_a, "peer"_a, "source"_a, "notification"_a,
           "value"_a = Integer{1}, nb::kw_only(), "queue"_a = Integer{0},
           "timeout"_a.none() = nb::none(), docs::kReadNotify)
      .def("read_list_notify", &read_list_notify, "pairs"_a, "peer"_a, "segment"_a,
           "notification"_a, "value"_a = Integer{1}, nb::kw_only(), "queue"_a = Integer{0},
           "timeout"_a.none() = nb::none(), docs::kReadListNotify)
      .def("notify_add", &notify_add, "peer"_a, "segment"_a, "notification"_a,
           "value"_a = Integer{1}, nb::kw_only(), "queue"_a = Integer{0},
           "timeout"_a.none() = nb::none(), docs::kNotifyAdd)
      .def("write_notify_add", &write_notify_add, "source"_a, "peer"_a, "target"_a,
           "notification"_a, "value"_a = Integer{1}, nb::kw_only(), "queue"_a = Integer{0},
           "timeout"_a.none() = nb::none(), docs::kWriteNotifyAdd)
      .def("write_list_notify_add", &write_list_notify_add, "pairs"_a, "peer"_a, "segment"_a,
           "notification"_a, "value"_a = Integer{1}, nb::kw_only(), "queue"_a = Integer{0},
           "timeout"_a.none() = nb::none(), docs::kWriteListNotifyAdd)
      .def("wait", &wait, "queue"_a = Integer{0}, nb::kw_only(), "timeout"_a.none() = nb::none(),
           docs::kWait)
      .def("notify_waitsome", &notify_waitsome, "segment"_a, "first"_a.none() = nb::none(),
           "count"_a.none() = nb::none(), nb::kw_only(), "timeout"_a.none() = nb::none(),
           docs::kNotifyWaitsome)
      .def("notify_wait_count", &notify_wait_count, "segment"_a, "notification"_a, "count"_a,
           nb::kw_only(), "timeout"_a.none() = nb::none(), docs::kNotifyWaitCount)
      .def("notify_reset", &notify_reset, "segment"_a, "notification"_a, docs::kNotifyReset)
      // Separate methods: every optional argument costs each call 10 ns.
      .def("notify_on", &notify_on, "stream"_a.none(), "peer"_a, "segment"_a, "notification"_a,
           "value"_a = Integer{1}, nb::kw_only(), "queue"_a = Integer{0},
           "timeout"_a.none() = nb::none(), docs::kNotifyOn)
      .def("write_notify_on", &write_notify_on, "stream"_a.none(), "source"_a, "peer"_a, "target"_a,
           "notification"_a, "value"_a = Integer{1}, nb::kw_only(), "queue"_a = Integer{0},
           "timeout"_a.none() = nb::none(), docs::kWriteNotifyOn)
      .def("write_list_notify_on", &write_list_notify_on, "stream"_a.none(), "pairs"_a, "peer"_a,
           "segment"_a, "notification"_a, "value"_a = Integer{1}, nb::kw_only(),
           "queue"_a = Integer{0}, "timeout"_a.none() = nb::none(), docs::kWriteListNotifyOn)
      .def("notify_wait_on", &notify_wait_on, "stream"_a.none(), "segment"_a, "notification"_a,
           nb::kw_only(), "timeout"_a.none() = nb::none(), docs::kNotifyWaitOn)
      .def(
          "notify_reset_on",
          [](const ContextHandle& self, nb::handle stream, const SegmentHandle& segment,
             Integer notification) {
            self.context().notify_reset_on(order_of(self, stream, require_device(*segment.segment)),
                                           segment.segment, notification.natural());
          },
          "stream"_a.none(), "segment"_a, "notification"_a, docs::kNotifyResetOn)
      .def(
          "atomic_fetch_add",
          [](const ContextHandle& self, const SliceArgument& target, Integer peer,
             std::int64_t value, std::optional<double> timeout) {
            return atomic(self, Atomic::Kind::kFetchAdd, target, peer,
                          static_cast<std::uint64_t>(value), 0, timeout);
          },
          "target"_a, "peer"_a, "value"_a, nb::kw_only(), "timeout"_a.none() = nb::none(),
          docs::kFetchAdd)
      .def(
          "atomic_compare_swap",
          [](const ContextHandle& self, const SliceArgument& target, Integer peer,
             std::int64_t compare, std::int64_t swap, std::optional<double> timeout) {
            return atomic(self, Atomic::Kind::kCompareSwap, target, peer,
                          static_cast<std::uint64_t>(swap), static_cast<std::uint64_t>(compare),
                          timeout);
          },
          "target"_a, "peer"_a, "compare"_a, "swap"_a, nb::kw_only(),
          "timeout"_a.none() = nb::none(), docs::kCompareSwap)
      .def(
          "queue_size",
          [](const ContextHandle& self, Integer queue) {
            return self.context().queue_size(queue.queue());
          },
          "queue"_a = Integer{0},
          "Return the requests posted on ``queue`` since it was last waited for.")
      .def(
          "queue_create", [](const ContextHandle& self) { return self.context().queue_create(); },
          "Make a queue and return its id; QueueError when ``limits.queues`` exist.")
      .def("_reconnect",
           [](const ContextHandle& self, Integer peer) {
             const WithoutGil release;
             self.context().reconnect(peer.rank());
           })
      .def(
          "queue_delete",
          [](const ContextHandle& self, Integer queue) {
            self.context().queue_delete(queue.queue());
          },
          "queue"_a, "Free a queue's id; wait for it first.");
  DirectCalls<notify_directly>::serve(context.attr("notify"));
  DirectCalls<write_notify_directly>::serve(context.attr("write_notify"));
  DirectCalls<notify_waitsome_directly>::serve(context.attr("notify_waitsome"));
  DirectCalls<notify_reset_directly>::serve(context.attr("notify_reset"));
}

}  // namespace pgasdl

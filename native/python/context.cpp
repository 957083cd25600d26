#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "python/docs.hpp"
#include "python/handles.hpp"
#include "transport/router.hpp"
#include "transport/table.hpp"

namespace pgasdl {
namespace {

using namespace nb::literals;

// From here on a post copies without the GIL.
constexpr std::uint64_t kBytesWithoutGil = 64 << 10;

std::vector<std::string> as_strings(const nb::list& blobs) {
  std::vector<std::string> strings;
  for (nb::handle blob : blobs) {
    const auto bytes = nb::cast<nb::bytes>(blob);
    strings.emplace_back(bytes.c_str(), bytes.size());
  }
  return strings;
}

nb::bytes as_bytes(const std::string& blob) { return nb::bytes(blob.data(), blob.size()); }

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

// What posting a list costs, in bytes copied: a long one may wait for room on the way.
std::uint64_t weight_of(std::span<const Pair> pairs) {
  constexpr std::uint64_t kRequest = 1 << 10;
  std::uint64_t weight = 0;
  for (const Pair& pair : pairs) weight += pair.local->bytes + kRequest;
  return weight;
}

// Posts; long copies and waits for a free place happen without the GIL.
template <typename Post>
void post(const ContextHandle& self, std::uint64_t weight, Integer peer, Integer queue,
          std::optional<double> timeout, Post&& attempt) {
  const double limit = seconds(self.context(), timeout);
  Outcome outcome;
  if (weight < kBytesWithoutGil) {
    outcome = blocking(limit, attempt);
  } else {
    {
      const nb::gil_scoped_release release;
      outcome = attempt(Deadline::once());
    }
    if (outcome != Outcome::kDone) outcome = blocking(limit, attempt);
  }
  if (outcome == Outcome::kConnecting) {
    // The first request to a peer makes the connection: one try includes that.
    const double patience = limit > 0 ? limit : self.context().options().timeout;
    if (limit == 0) outcome = blocking(patience, attempt);
    if (outcome == Outcome::kConnecting) {
      raise("Timeout", text("rank ", peer.value,
                            " has not answered a request for a connection on "
                            "queue ",
                            queue.value, " for ", patience, " s; nothing was posted"));
    }
  }
  if (outcome != Outcome::kDone) {
    raise("QueueFull", text("queue ", queue.value, " holds ", self.context().options().queue_depth,
                            " requests; nothing was posted: wait(", queue.value,
                            "), then post again, or use another queue"));
  }
}

void write(const ContextHandle& self, const SliceHandle& source, Integer peer,
           const SliceHandle& target, Integer queue, std::optional<double> timeout) {
  const Pair pair{&source.slice, &target.slice};
  post(self, source.slice.bytes, peer, queue, timeout, [&](Deadline deadline) {
    return self.context().write({&pair, 1}, peer.rank(), queue.queue(), deadline);
  });
}

void read(const ContextHandle& self, const SliceHandle& target, Integer peer,
          const SliceHandle& source, Integer queue, std::optional<double> timeout) {
  const Pair pair{&target.slice, &source.slice};
  post(self, target.slice.bytes, peer, queue, timeout, [&](Deadline deadline) {
    return self.context().read({&pair, 1}, peer.rank(), queue.queue(), deadline);
  });
}

void write_list(const ContextHandle& self, const nb::sequence& list, Integer peer, Integer queue,
                std::optional<double> timeout) {
  const auto pairs = pairs_of(list);
  post(self, weight_of(pairs), peer, queue, timeout, [&](Deadline deadline) {
    return self.context().write(pairs, peer.rank(), queue.queue(), deadline);
  });
}

void read_list(const ContextHandle& self, const nb::sequence& list, Integer peer, Integer queue,
               std::optional<double> timeout) {
  const auto pairs = pairs_of(list);
  post(self, weight_of(pairs), peer, queue, timeout, [&](Deadline deadline) {
    return self.context().read(pairs, peer.rank(), queue.queue(), deadline);
  });
}

void notify(const ContextHandle& self, Integer peer, const SegmentHandle& segment,
            Integer notification, Integer value, Integer queue, std::optional<double> timeout) {
  post(self, 0, peer, queue, timeout, [&](Deadline deadline) {
    return self.context().notify(peer.rank(), *segment.segment, notification.natural(),
                                 value.natural(), queue.queue(), deadline);
  });
}

void write_notify(const ContextHandle& self, const SliceHandle& source, Integer peer,
                  const SliceHandle& target, Integer notification, Integer value, Integer queue,
                  std::optional<double> timeout) {
  const Pair pair{&source.slice, &target.slice};
  post(self, source.slice.bytes, peer, queue, timeout, [&](Deadline deadline) {
    return self.context().write_notify({&pair, 1}, peer.rank(), *target.slice.segment,
                                       notification.natural(), value.natural(), queue.queue(),
                                       deadline);
  });
}

void write_list_notify(const ContextHandle& self, const nb::sequence& list, Integer peer,
                       const SegmentHandle& segment, Integer notification, Integer value,
                       Integer queue, std::optional<double> timeout) {
  const auto pairs = pairs_of(list);
  post(self, weight_of(pairs), peer, queue, timeout, [&](Deadline deadline) {
    return self.context().write_notify(pairs, peer.rank(), *segment.segment, notification.natural(),
                                       value.natural(), queue.queue(), deadline);
  });
}

void read_notify(const ContextHandle& self, const SliceHandle& target, Integer peer,
                 const SliceHandle& source, Integer notification, Integer value, Integer queue,
                 std::optional<double> timeout) {
  const Pair pair{&target.slice, &source.slice};
  post(self, target.slice.bytes, peer, queue, timeout, [&](Deadline deadline) {
    return self.context().read_notify({&pair, 1}, peer.rank(), *target.slice.segment,
                                      notification.natural(), value.natural(), queue.queue(),
                                      deadline);
  });
}

void read_list_notify(const ContextHandle& self, const nb::sequence& list, Integer peer,
                      const SegmentHandle& segment, Integer notification, Integer value,
                      Integer queue, std::optional<double> timeout) {
  const auto pairs = pairs_of(list);
  post(self, weight_of(pairs), peer, queue, timeout, [&](Deadline deadline) {
    return self.context().read_notify(pairs, peer.rank(), *segment.segment, notification.natural(),
                                      value.natural(), queue.queue(), deadline);
  });
}

void wait(const ContextHandle& self, Integer queue, std::optional<double> timeout) {
  Context& context = self.context();
  if (blocking(seconds(context, timeout), [&](Deadline deadline) {
        return context.wait(queue.queue(), deadline);
      }) != Outcome::kDone) {
    raise("Timeout", text("wait: queue ", queue.value, " still holds requests"));
  }
}

std::optional<std::uint32_t> notify_waitsome(const ContextHandle& self,
                                             const SegmentHandle& segment, Integer first,
                                             std::optional<Integer> count,
                                             std::optional<double> timeout) {
  Context& context = self.context();
  const std::uint64_t begin = first.natural();
  const std::uint64_t all = segment.segment->notifications();
  const std::uint64_t number = count ? count->natural() : all - std::min(begin, all);
  if (number == 0) return std::nullopt;
  std::uint32_t found = 0;
  if (blocking(seconds(context, timeout), [&](Deadline deadline) {
        return context.notify_waitsome(*segment.segment, begin, number, deadline, found);
      }) != Outcome::kDone) {
    raise("Timeout",
          text("notify_waitsome: none of notifications ", begin, " to ", begin + number - 1,
               " of segment ", segment.segment->id(), " was raised on rank ", context.rank()));
  }
  return found;
}

std::uint64_t atomic(const ContextHandle& self, Atomic::Kind kind, const SliceHandle& target,
                     Integer peer, std::uint64_t operand, std::uint64_t compare,
                     std::optional<double> timeout) {
  Context& context = self.context();
  std::uint64_t old = 0;
  const double limit = seconds(context, timeout);
  Outcome outcome;
  {
    const nb::gil_scoped_release release;
    outcome =
        context.atomic(kind, target.slice, peer.rank(), operand, compare, Deadline::in(limit), old);
  }
  if (outcome != Outcome::kDone) {
    raise("Timeout", text("an atomic on rank ", peer.value, " did not complete"));
  }
  return old;
}

// One transport, or several behind a router: `names` is what carries bytes to each rank.
std::unique_ptr<Transport> make_transports(const std::vector<std::string>& names,
                                           const TransportSetup& setup) {
  // In the same order on every rank: peers take each other's words apart by it.
  std::vector<std::string> different(names);
  std::sort(different.begin(), different.end());
  different.erase(std::unique(different.begin(), different.end()), different.end());
  std::vector<std::unique_ptr<Transport>> made;
  for (const std::string& name : different) {
    made.push_back(transport_row(name).make(setup));
  }
  std::vector<std::size_t> routes;
  for (const std::string& name : names) {
    const auto found = std::find(different.begin(), different.end(), name);
    routes.push_back(static_cast<std::size_t>(found - different.begin()));
  }
  if (made.size() == 1) return std::move(made[0]);
  return std::make_unique<Router>(std::move(made), std::move(routes));
}

}  // namespace

void bind_context(nb::module_& module) {
  module.def(
      "common_ancestor", [](const std::vector<pid_t>& pids) { return common_ancestor(pids); },
      "pids"_a, "The nearest process that each of these is or descends from, 0 if there is none.");
  module.def("host_identity", &host_identity,
             "Equal for processes that can map each other's memory.");
  nb::class_<ContextHandle>(module, "ContextCore", "One rank of a job; see pgasdl.Context.")
      .def(
          "__init__",
          [](ContextHandle* self, Rank rank, Rank size, const std::vector<std::string>& transports,
             nb::bytes token, std::shared_ptr<LoopbackWorld> world, double timeout,
             std::uint32_t queue_depth, std::uint32_t queues, std::uint64_t passive_bytes,
             double spin_us, double yield_us, std::uint32_t heartbeat_ms, double stopped_after,
             const std::optional<std::string>& verbs_device, std::optional<int> verbs_port,
             std::optional<int> verbs_gid, std::shared_ptr<MpiWorld> mpi, bool mpi_created) {
            Options options;
            options.timeout = timeout;
            options.queue_depth = queue_depth;
            options.queues = queues;
            options.passive_bytes = passive_bytes;
            options.spin_us = spin_us;
            options.yield_us = yield_us;
            options.heartbeat_ms = heartbeat_ms;
            options.stopped_after = stopped_after;
            TransportSetup setup;
            setup.rank = rank;
            setup.size = size;
            setup.token = std::string(token.c_str(), token.size());
            setup.verbs = verbs_options(verbs_device, verbs_port, verbs_gid);
            setup.verbs.queues = queues + Context::kOwnQueues;
            setup.verbs.timeout_s = stopped_after;
            setup.mpi = {setup.verbs.queues, mpi_created, stopped_after};
            setup.loopback_world = std::move(world);
            setup.mpi_world = std::move(mpi);
            // A forked child never destroys what it inherited: its threads and locks are the
            // parent's.
            new (self) ContextHandle{std::shared_ptr<Runtime>(
                new Runtime(rank, size, make_transports(transports, setup), options),
                [](Runtime* runtime) {
                  if (!runtime->context.inherited()) delete runtime;
                })};
          },
          "rank"_a, "size"_a, "transports"_a, "token"_a, "world"_a.none(), nb::kw_only(),
          "timeout"_a, "queue_depth"_a, "queues"_a, "passive_bytes"_a, "spin_us"_a, "yield_us"_a,
          "heartbeat_ms"_a, "stopped_after"_a, "verbs_device"_a.none() = nb::none(),
          "verbs_port"_a.none() = nb::none(), "verbs_gid"_a.none() = nb::none(),
          "mpi"_a.none() = nb::none(), "mpi_created"_a = false)
      .def("_endpoint",
           [](const ContextHandle& self) { return as_bytes(self.context().endpoint()); })
      .def("_connect",
           [](const ContextHandle& self, const nb::list& endpoints) {
             self.context().connect(as_strings(endpoints));
           })
      .def("_open", [](const ContextHandle& self) { return as_bytes(self.context().open()); })
      .def("_join",
           [](const ContextHandle& self, const nb::list& descriptions, double timeout) {
             const auto blobs = as_strings(descriptions);
             const nb::gil_scoped_release release;
             self.context().join(blobs, Deadline::in(timeout));
           })
      .def("_world",
           [](const ContextHandle& self) {
             return GroupHandle{self.runtime, self.context().world()};
           })
      .def(
          "_seconds",
          [](const ContextHandle& self, std::optional<double> timeout) {
            return seconds(self.context(), timeout);
          },
          "timeout"_a.none(), "A timeout, checked, or the default.")
      .def("_close",
           [](const ContextHandle& self, bool failed) {
             const nb::gil_scoped_release release;
             if (!self.context().inherited()) self.runtime->executor.stop_thread();
             self.context().close(failed);
           })
      .def("_record",
           [](const ContextHandle& self) {
             return self.context().recorder().dump(self.context().rank());
           })
      .def("_pid_of",
           [](const ContextHandle& self, Integer peer) {
             self.context().require_peer(peer.rank(), "kill");
             return self.context().pid_of(peer.rank());
           })
      .def("_require_usable", [](const ContextHandle& self) { self.context().require_usable(); })
      .def("_require_peer",
           [](const ContextHandle& self, Integer peer, const char* operation) {
             self.context().require_peer(peer.rank(), operation);
           })
      .def("_health",
           [](const ContextHandle& self) {
             nb::list states;
             for (Rank peer = 0; peer < self.context().size(); ++peer) {
               const std::string_view word = name(self.context().liveness().health(peer));
               states.append(nb::str(word.data(), word.size()));
             }
             return states;
           })
      .def("_acknowledge",
           [](const ContextHandle& self) {
             self.context().require_usable();
             self.context().liveness().acknowledge();
           })
      .def_prop_ro(
          "rank", [](const ContextHandle& self) { return self.context().rank(); },
          "This rank's number, 0 <= rank < size.")
      .def_prop_ro(
          "size", [](const ContextHandle& self) { return self.context().size(); },
          "Number of ranks in the job.")
      .def_prop_ro(
          "closed", [](const ContextHandle& self) { return self.context().closed(); },
          "Whether the context was closed.")
      .def_prop_ro(
          "timeout", [](const ContextHandle& self) { return self.context().options().timeout; },
          "Seconds that a call waits at most when it names no timeout.")
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
      .def("wait", &wait, "queue"_a = Integer{0}, nb::kw_only(), "timeout"_a.none() = nb::none(),
           docs::kWait)
      .def("notify_waitsome", &notify_waitsome, "segment"_a, "first"_a = Integer{0},
           "count"_a.none() = nb::none(), nb::kw_only(), "timeout"_a.none() = nb::none(),
           docs::kNotifyWaitsome)
      .def(
          "notify_reset",
          [](const ContextHandle& self, const SegmentHandle& segment, Integer notification) {
            return self.context().notify_reset(*segment.segment, notification.natural());
          },
          "segment"_a, "notification"_a, docs::kNotifyReset)
      .def(
          "atomic_fetch_add",
          [](const ContextHandle& self, const SliceHandle& target, Integer peer, std::int64_t value,
             std::optional<double> timeout) {
            return atomic(self, Atomic::Kind::kFetchAdd, target, peer,
                          static_cast<std::uint64_t>(value), 0, timeout);
          },
          "target"_a, "peer"_a, "value"_a, nb::kw_only(), "timeout"_a.none() = nb::none(),
          docs::kFetchAdd)
      .def(
          "atomic_compare_swap",
          [](const ContextHandle& self, const SliceHandle& target, Integer peer,
             std::uint64_t compare, std::uint64_t swap, std::optional<double> timeout) {
            return atomic(self, Atomic::Kind::kCompareSwap, target, peer, swap, compare, timeout);
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
             const nb::gil_scoped_release release;
             self.context().reconnect(peer.rank());
           })
      .def(
          "queue_delete",
          [](const ContextHandle& self, Integer queue) {
            self.context().queue_delete(queue.queue());
          },
          "queue"_a, "Free a queue's id; wait for it first.");
}

}  // namespace pgasdl

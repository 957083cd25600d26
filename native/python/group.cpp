#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/handles.hpp"

namespace pgasdl {

using namespace nb::literals;

namespace {

std::vector<std::string> strings_of(const nb::list& blobs) {
  std::vector<std::string> strings;
  for (nb::handle blob : blobs) {
    const auto bytes = nb::cast<nb::bytes>(blob);
    strings.emplace_back(bytes.c_str(), bytes.size());
  }
  return strings;
}

void barrier(const GroupHandle& self, std::optional<double> timeout) {
  const double limit = seconds(self.runtime->context, timeout);
  const Group::Inside inside(*self.group, Group::Kind::kBarrier, "barrier");
  if (blocking(limit, [&](Deadline deadline) { return self.group->barrier(inside, deadline); }) !=
      Outcome::kDone) {
    raise("PgasTimeoutError", self.group->missing_in_barrier());
  }
}

nb::list allgather(const GroupHandle& self, bool reduction, const std::string& what,
                   std::uint64_t fingerprint, nb::bytes mine, std::optional<double> timeout) {
  const auto kind = reduction ? Group::Kind::kReduce : Group::Kind::kExchange;
  const auto bytes = std::as_bytes(std::span(mine.c_str(), mine.size()));
  std::vector<std::string> all;
  const double limit = seconds(self.runtime->context, timeout);
  const Group::Inside inside(*self.group, kind, what);
  if (blocking(limit, [&](Deadline deadline) {
        return self.group->allgather(inside, kind, what, fingerprint, bytes, deadline, all);
      }) != Outcome::kDone) {
    raise("PgasTimeoutError", self.group->missing_in_allgather(kind, what));
  }
  nb::list result;
  for (const std::string& blob : all) result.append(nb::bytes(blob.data(), blob.size()));
  return result;
}

void passive_send(const GroupHandle& self, nb::handle data, Integer peer,
                  std::optional<double> timeout) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
  const std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> release(&view, PyBuffer_Release);
  const std::span message(static_cast<const std::byte*>(view.buf),
                          static_cast<std::size_t>(view.len));
  if (blocking(seconds(self.runtime->context, timeout), [&](Deadline deadline) {
        return self.group->passive_send(peer.rank(), message, deadline);
      }) != Outcome::kDone) {
    raise("PgasTimeoutError",
          text("passive_send: rank ", peer.value,
               " has not taken this rank's previous message; nothing was sent"));
  }
}

nb::tuple passive_receive(const GroupHandle& self, std::optional<double> timeout) {
  Rank sender = -1;
  std::string message;
  if (blocking(seconds(self.runtime->context, timeout), [&](Deadline deadline) {
        return self.group->passive_receive(deadline, sender, message);
      }) != Outcome::kDone) {
    raise("PgasTimeoutError", "passive_receive: no rank has sent a message");
  }
  return nb::make_tuple(sender, nb::bytes(message.data(), message.size()));
}

nb::dict group_memory(std::size_t members, bool world, std::uint64_t passive_bytes) {
  const Group::Memory memory = Group::memory(members, world, passive_bytes);
  nb::dict parts;
  parts["states"] = memory.states;
  parts["gossip"] = memory.gossip;
  parts["slots"] = memory.exchange + memory.reduce;
  parts["mail"] = memory.mail;
  parts["flags"] = board_words(memory.flags) * sizeof(FlagWord);
  return parts;
}

std::vector<std::size_t> group_distances(std::size_t members, bool barrier) {
  const auto kind = barrier ? Group::Kind::kBarrier : Group::Kind::kExchange;
  std::vector<std::size_t> distances;
  for (const DisseminationStep& step : Group::steps(kind, members)) {
    distances.push_back(step.distance);
  }
  return distances;
}

}  // namespace

void bind_group(nb::module_& module) {
  module.def(
      "group_memory", &group_memory, "members"_a, "world"_a, "passive_bytes"_a,
      nb::sig("def group_memory(members: int, world: bool, passive_bytes: int) -> dict[str, int]"),
      "Bytes that a group of so many ranks takes of each for the library, by what they are "
      "for; world: the group of all ranks of a job.");
  module.def("heartbeat_distances", &Gossip::distances, "n_ranks"_a,
             "How far ahead those are, modulo the number of ranks, to which a rank sends "
             "heartbeats if all are machines of their own.");
  module.def(
      "group_distances", &group_distances, "members"_a, "barrier"_a,
      "How far ahead are those to which a member sends in a barrier, or in an all-gather; it "
      "gets from those as far behind.");
  nb::class_<GroupHandle>(module, "GroupCore", "Ranks that act together; see pgasdl.Group.")
      .def(
          "__init__",
          [](GroupHandle* self, const ContextHandle& context, std::vector<Rank> ranks) {
            context.context().require_usable();
            new (self)
                GroupHandle{context.runtime,
                            std::make_shared<Group>(context.context(), std::move(ranks), false)};
          },
          "context"_a, "ranks"_a)
      .def("describe",
           [](const GroupHandle& self) {
             const std::string blob = self.group->describe();
             return nb::bytes(blob.data(), blob.size());
           })
      .def("attach",
           [](const GroupHandle& self, const nb::list& descriptions, double timeout) {
             const auto blobs = strings_of(descriptions);
             Outcome outcome;
             {
               const WithoutGil release;
               outcome = self.group->attach(blobs, Deadline::in(timeout));
             }
             if (outcome != Outcome::kDone) {
               raise("PgasTimeoutError",
                     "group: every member has described itself, but not all were there "
                     "at once to make its memory; call it again");
             }
           })
      .def_prop_ro("ranks",
                   [](const GroupHandle& self) { return nb::tuple(nb::cast(self.group->ranks())); })
      .def_prop_ro("size", [](const GroupHandle& self) { return self.group->size(); })
      .def_prop_ro("index", [](const GroupHandle& self) { return self.group->index(); })
      .def("barrier", &barrier, "timeout"_a.none() = nb::none())
      .def("allgather", &allgather, "reduction"_a, "what"_a, "fingerprint"_a, "mine"_a,
           "timeout"_a.none() = nb::none())
      .def_prop_ro(
          "half_bound",
          [](const GroupHandle& self) {
            return reinterpret_cast<std::uintptr_t>(self.group->half_bound());
          },
          "Address of memory whose binding ended half way, or 0.")
      .def("passive_send", &passive_send, "data"_a, "peer"_a, "timeout"_a.none() = nb::none())
      .def("passive_receive", &passive_receive, "timeout"_a.none() = nb::none())
      .def("remove", [](const GroupHandle& self) { self.group->remove(); });
}

}  // namespace pgasdl

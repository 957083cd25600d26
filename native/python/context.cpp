#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "python/handles.hpp"
#include "transport/router.hpp"
#include "transport/table.hpp"
#include "transport/tcp/socket.hpp"

namespace pgasdl {
namespace {

using namespace nb::literals;

std::vector<std::string> as_strings(const nb::list& blobs) {
  std::vector<std::string> strings;
  for (nb::handle blob : blobs) {
    const auto bytes = nb::cast<nb::bytes>(blob);
    strings.emplace_back(bytes.c_str(), bytes.size());
  }
  return strings;
}

nb::bytes as_bytes(const std::string& blob) { return nb::bytes(blob.data(), blob.size()); }

// One transport, or several behind a router: `names` says which one carries bytes to each rank.
std::unique_ptr<Transport> make_transports(const std::vector<std::string>& names,
                                           const TransportSetup& setup) {
  // In the same order on every rank, since peers split each other's words by it.
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
  module.def(
      "tcp_place",
      [](const std::string& interfaces) {
        return tcp_place(nullptr, TcpOptions{.interfaces = interfaces});
      },
      "interfaces"_a, "The addresses by which peers find this machine, with their interfaces.");
  nb::class_<ContextHandle> context(module, "ContextCore",
                                    "One rank of a job; see pgasdl.Context.");
  context
      .def(
          "__init__",
          [](ContextHandle* self, Rank rank, Rank size, const std::vector<std::string>& transports,
             nb::bytes token, std::shared_ptr<LoopbackWorld> world, double timeout,
             std::uint32_t queue_depth, std::uint32_t queues, std::uint64_t passive_bytes,
             double spin_us, double yield_us, std::uint32_t heartbeat_ms, double stopped_after,
             bool survivable, const VerbsOptions& verbs, std::shared_ptr<MpiWorld> mpi,
             bool mpi_created, bool reach_devices, const std::string& tcp_interface,
             std::pair<std::uint16_t, std::uint16_t> tcp_ports) {
            Options options;
            options.timeout = timeout;
            options.queue_depth = queue_depth;
            options.queues = queues;
            options.passive_bytes = passive_bytes;
            options.spin_us = spin_us;
            options.yield_us = yield_us;
            options.heartbeat_ms = heartbeat_ms;
            options.stopped_after = stopped_after;
            options.survivable = survivable;
            options.reach_devices = reach_devices;
            TransportSetup setup;
            setup.rank = rank;
            setup.size = size;
            setup.token = std::string(token.c_str(), token.size());
            setup.verbs = verbs;
            setup.verbs.queues = queues + Context::kOwnQueues;
            setup.mpi = {setup.verbs.queues, mpi_created, stopped_after};
            setup.tcp = {tcp_interface, tcp_ports.first, tcp_ports.second, setup.verbs.queues,
                         stopped_after};
            setup.loopback_world = std::move(world);
            setup.mpi_world = std::move(mpi);
            // A forked child never destroys its inherited runtime: its threads and locks are not
            // its own.
            new (self) ContextHandle{std::shared_ptr<Runtime>(
                new Runtime(rank, size, make_transports(transports, setup), options),
                [](Runtime* runtime) {
                  if (!runtime->context.inherited()) delete runtime;
                })};
          },
          "rank"_a, "size"_a, "transports"_a, "token"_a, "world"_a.none(), nb::kw_only(),
          "timeout"_a, "queue_depth"_a, "queues"_a, "passive_bytes"_a, "spin_us"_a, "yield_us"_a,
          "heartbeat_ms"_a, "stopped_after"_a, "survivable"_a, "verbs"_a,
          "mpi"_a.none() = nb::none(), "mpi_created"_a = false, "reach_devices"_a = true,
          "tcp_interface"_a = "", "tcp_ports"_a = std::pair<int, int>(0, 0))
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
             const WithoutGil release;
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
      .def("_give_reason", [](const ContextHandle& self,
                              const std::string& reason) { self.context().give_reason(reason); })
      .def("_close",
           [](const ContextHandle& self, bool failed) {
             const auto close = [&](bool as_failed) {
               const WithoutGil release;
               if (!self.context().inherited()) self.runtime->executor.stop_thread();
               self.context().close(as_failed);
             };
             try {
               if (!failed) {
                 await_streams([&](Deadline deadline) {
                   return self.runtime->executor.await_streamed(nullptr, deadline);
                 });
               }
             } catch (const nb::python_error&) {
               close(true);
               throw;
             }
             close(failed);
           })
      .def("_record",
           [](const ContextHandle& self) {
             Context& context = self.context();
             const std::string wait = context.liveness().own_wait();
             return text(context.recorder().dump(context.rank()), wait, wait.empty() ? "" : "\n");
           })
      .def("_pid_of",
           [](const ContextHandle& self, Integer peer) {
             self.context().require_peer(peer.rank(), "kill");
             return self.context().pid_of(peer.rank());
           })
      .def("_kill",
           [](const ContextHandle& self, Integer peer) {
             Liveness& liveness = self.context().liveness();
             const WithoutGil release;
             liveness.kill(peer.rank());
           })
      .def("_transport_state",
           [](const ContextHandle& self) { return self.context().transport().describe(); })
      .def("_require_usable", [](const ContextHandle& self) { self.context().require_usable(); })
      .def("_require_peer",
           [](const ContextHandle& self, Integer peer, const char* operation) {
             self.context().require_peer(peer.rank(), operation);
           })
      .def("_loss_in_words", [](const ContextHandle& self,
                                Rank lost) { return self.context().liveness().in_words(lost); })
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
             const WithoutGil release;
             return self.context().acknowledge();
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
      .def(
          "_why_unreached",
          [](const ContextHandle& self, int device) {
            return self.context().why_unreached(device);
          },
          "device"_a, "Why peers do not reach segments on a GPU; empty: they do.")
      .def_prop_ro(
          "_own_bytes", [](const ContextHandle& self) { return self.context().own_bytes(); },
          "Bytes of the groups' own memory on this rank.")
      .def("_connections",
           [](const ContextHandle& self) {
             const Context& core = self.context();
             const QueueId own = core.internal_queue();
             const QueueId plans = core.plan_queue();
             return std::make_tuple(core.connections(0, own), core.connections(own, plans),
                                    core.connections(plans, plans + 1));
           })
      .def("_traffic",
           [](const ContextHandle& self) {
             const auto words = [](const Traffic& traffic) {
               return std::make_tuple(traffic.bytes_written, traffic.messages_written,
                                      traffic.bytes_read, traffic.messages_read,
                                      traffic.notifications);
             };
             std::vector<decltype(words({}))> peers;
             for (Rank peer = 0; peer < self.context().size(); ++peer) {
               peers.push_back(words(self.context().counters().with(peer)));
             }
             return peers;
           })
      .def_prop_ro(
          "_registrations",
          [](const ContextHandle& self) { return self.context().counters().registrations(); })
      .def("_waits",
           [](const ContextHandle& self) {
             const double tick = self.context().recorder().seconds_per_tick();
             std::map<std::string, std::tuple<std::uint64_t, double>> waits;
             for (std::size_t cause = 0; cause < kWaitCauses.size(); ++cause) {
               const Waits each = self.context().counters().waits(cause);
               waits.emplace(kWaitCauses[cause],
                             std::tuple(each.number, static_cast<double>(each.ticks) * tick));
             }
             return waits;
           })
      .def_prop_ro(
          "timeout", [](const ContextHandle& self) { return self.context().options().timeout; },
          "Seconds that a call waits at most when it names no timeout.");
  bind_operations(context);
}

}  // namespace pgasdl

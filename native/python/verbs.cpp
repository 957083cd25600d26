#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/handles.hpp"
#include "transport/table.hpp"

namespace pgasdl {

using namespace nb::literals;

void bind_verbs(nb::module_& module) {
  nb::class_<VerbsOptions>(module, "VerbsOptions",
                           "What `pgasdl env` calls PGASDL_VERBS_*; without arguments: the best.")
      .def(
          "__init__",
          [](VerbsOptions* self, const std::vector<std::pair<std::string, int>>& ports,
             bool excluded, std::optional<int> gid, std::optional<int> pkey, std::optional<int> mtu,
             int service_level, int traffic_class, bool global_routes, int retry_count,
             int rnr_retry_count, std::optional<int> ack_timeout, std::uint32_t inline_bytes,
             const std::string& order, const std::vector<int>& distances, std::uint32_t turn,
             std::uint32_t rails, std::uint64_t stripe, bool warns, double stopped_after) {
            new (self) VerbsOptions;
            for (const auto& [device, port] : ports) self->ports.push_back({device, port});
            self->excluded = excluded;
            self->gid_index = gid.value_or(self->gid_index);
            self->pkey = pkey.value_or(self->pkey);
            self->mtu = mtu.value_or(self->mtu);
            self->service_level = service_level;
            self->traffic_class = traffic_class;
            self->global_routes = global_routes;
            self->retry_count = retry_count;
            self->rnr_retry_count = rnr_retry_count;
            self->ack_timeout = ack_timeout.value_or(self->ack_timeout);
            self->inline_bytes = inline_bytes;
            self->order = order == "kept"         ? VerbsOrder::kKept
                          : order == "completion" ? VerbsOrder::kCompletion
                                                  : VerbsOrder::kAuto;
            self->distances = distances;
            self->turn = turn;
            self->rails = rails;
            self->stripe = stripe;
            self->warns = warns;
            self->timeout_s = stopped_after;
          },
          nb::kw_only(), "ports"_a, "excluded"_a, "gid"_a.none(), "pkey"_a.none(), "mtu"_a.none(),
          "service_level"_a, "traffic_class"_a, "global_routes"_a, "retry_count"_a,
          "rnr_retry_count"_a, "ack_timeout"_a.none(), "inline_bytes"_a, "order"_a,
          "distances"_a = std::vector<int>(), "turn"_a = 0, "rails"_a, "stripe"_a, "warns"_a,
          "stopped_after"_a)
      .def(nb::init<>());
  nb::class_<VerbsDeviceInfo>(module, "VerbsDeviceInfo",
                              "An address by which RDMA peers reach this machine.")
      .def_ro("device", &VerbsDeviceInfo::device)
      .def_ro("port", &VerbsDeviceInfo::port)
      .def_ro("gid_index", &VerbsDeviceInfo::gid_index)
      .def_ro("state", &VerbsDeviceInfo::state)
      .def_ro("link_layer", &VerbsDeviceInfo::link_layer)
      .def_ro("mtu", &VerbsDeviceInfo::mtu)
      .def_ro("path_mtu", &VerbsDeviceInfo::path_mtu)
      .def_ro("pkey", &VerbsDeviceInfo::pkey)
      .def_ro("ack_timeout", &VerbsDeviceInfo::ack_timeout)
      .def_ro("keeps_order", &VerbsDeviceInfo::keeps_order)
      .def_ro("gigabits", &VerbsDeviceInfo::gigabits)
      .def_ro("gid", &VerbsDeviceInfo::gid)
      .def_ro("type", &VerbsDeviceInfo::type)
      .def_ro("net_device", &VerbsDeviceInfo::net_device)
      .def_ro("numa_node", &VerbsDeviceInfo::numa_node)
      .def_ro("lid", &VerbsDeviceInfo::lid)
      .def_ro("turn", &VerbsDeviceInfo::turn)
      .def_ro("chosen", &VerbsDeviceInfo::chosen)
      .def_ro("refused", &VerbsDeviceInfo::refused);
  module.def(
      "verbs_devices",
      [](const VerbsOptions& options) { return transport_row("verbs").devices(options); },
      "options"_a, "Every address, best first, each with the reason why it is not used if not.");
  module.def(
      "verbs_inline_bytes",
      [](const VerbsOptions& options) { return transport_row("verbs").inline_bytes(options); },
      "options"_a, "How many bytes a request takes inline on the chosen device.");
  module.def(
      "transport_missing",
      [](const std::string& name, const VerbsOptions& verbs, std::shared_ptr<MpiWorld> mpi) {
        TransportSetup setup;
        setup.verbs = verbs;
        setup.mpi_world = std::move(mpi);
        return transport_missing(name, setup);
      },
      "name"_a, nb::kw_only(), "verbs"_a, "mpi"_a.none(),
      "Why this rank lacks a transport; empty if it has it.");
  module.def(
      "transports",
      [] {
        nb::typed<nb::dict, nb::str, nb::str> rows;
        for (const TransportRow& row : transports()) {
          rows[nb::str(row.name.data(), row.name.size())] =
              nb::str(row.left_out.data(), row.left_out.size());
        }
        return rows;
      },
      "The table of transports: each one's name, and why it was left out of this build if it was.");
}

}  // namespace pgasdl

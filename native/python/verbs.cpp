#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/handles.hpp"
#include "transport/table.hpp"

namespace pgasdl {

using namespace nb::literals;

VerbsOptions verbs_options(const std::optional<std::string>& device, std::optional<int> port,
                           std::optional<int> gid) {
  VerbsOptions options;
  options.device = device.value_or("");
  options.port = port.value_or(0);
  options.gid_index = gid.value_or(-1);
  return options;
}

void bind_verbs(nb::module_& module) {
  nb::class_<VerbsDeviceInfo>(module, "VerbsDeviceInfo",
                              "An address by which RDMA peers reach this machine.")
      .def_ro("device", &VerbsDeviceInfo::device)
      .def_ro("port", &VerbsDeviceInfo::port)
      .def_ro("gid_index", &VerbsDeviceInfo::gid_index)
      .def_ro("state", &VerbsDeviceInfo::state)
      .def_ro("link_layer", &VerbsDeviceInfo::link_layer)
      .def_ro("mtu", &VerbsDeviceInfo::mtu)
      .def_ro("gigabits", &VerbsDeviceInfo::gigabits)
      .def_ro("gid", &VerbsDeviceInfo::gid)
      .def_ro("type", &VerbsDeviceInfo::type)
      .def_ro("net_device", &VerbsDeviceInfo::net_device)
      .def_ro("numa_node", &VerbsDeviceInfo::numa_node)
      .def_ro("chosen", &VerbsDeviceInfo::chosen)
      .def_ro("refused", &VerbsDeviceInfo::refused);
  module.def(
      "verbs_devices",
      [](const std::optional<std::string>& device, std::optional<int> port,
         std::optional<int> gid) {
        return transport_row("verbs").devices(verbs_options(device, port, gid));
      },
      "device"_a.none() = nb::none(), "port"_a.none() = nb::none(), "gid"_a.none() = nb::none(),
      "Every address, best first, each with the reason why it is not used if it is not.");
  module.def(
      "verbs_missing",
      [](const std::optional<std::string>& device, std::optional<int> port,
         std::optional<int> gid) {
        return transport_missing("verbs", verbs_options(device, port, gid));
      },
      "device"_a.none() = nb::none(), "port"_a.none() = nb::none(), "gid"_a.none() = nb::none(),
      "Why there is no verbs transport here; empty if there is.");
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

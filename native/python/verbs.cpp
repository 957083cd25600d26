#include "transport/verbs.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/handles.hpp"

namespace pgasdl {
namespace {

using namespace nb::literals;

std::vector<VerbsDeviceInfo> devices(const std::optional<std::string>& device,
                                     std::optional<int> port, std::optional<int> gid) {
  VerbsOptions options;
  options.device = device.value_or("");
  options.port = port.value_or(0);
  options.gid_index = gid.value_or(-1);
  return verbs_devices(options);
}

// Why there is none here; empty if there is one.
std::string missing(const std::optional<std::string>& device, std::optional<int> port,
                    std::optional<int> gid) {
  std::string refused;
  try {
    for (const VerbsDeviceInfo& info : devices(device, port, gid)) {
      if (info.chosen) return "";
      refused += text(refused.empty() ? "" : "; ", info.device, ": ", info.refused);
    }
  } catch (const Error& error) {
    return error.what();
  }
  return refused.empty() ? "no RDMA device" : refused;
}

}  // namespace

void bind_verbs(nb::module_& module) {
  nb::class_<VerbsDeviceInfo>(module, "VerbsDeviceInfo",
                              "An address by which RDMA peers reach this machine.")
      .def_ro("device", &VerbsDeviceInfo::device)
      .def_ro("port", &VerbsDeviceInfo::port)
      .def_ro("gid_index", &VerbsDeviceInfo::gid_index)
      .def_ro("state", &VerbsDeviceInfo::state)
      .def_ro("link_layer", &VerbsDeviceInfo::link_layer)
      .def_ro("mtu", &VerbsDeviceInfo::mtu)
      .def_ro("gid", &VerbsDeviceInfo::gid)
      .def_ro("type", &VerbsDeviceInfo::type)
      .def_ro("net_device", &VerbsDeviceInfo::net_device)
      .def_ro("numa_node", &VerbsDeviceInfo::numa_node)
      .def_ro("chosen", &VerbsDeviceInfo::chosen)
      .def_ro("refused", &VerbsDeviceInfo::refused);
  module.def("verbs_devices", &devices, "device"_a.none() = nb::none(),
             "port"_a.none() = nb::none(), "gid"_a.none() = nb::none(),
             "Every address, best first, each with the reason why it is not used if it is not.");
  module.def("verbs_missing", &missing, "device"_a.none() = nb::none(),
             "port"_a.none() = nb::none(), "gid"_a.none() = nb::none(),
             "Why there is no verbs transport here; empty if there is.");
}

}  // namespace pgasdl

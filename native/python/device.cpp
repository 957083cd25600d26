#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdio>

#include "memory/device_region.hpp"
#include "python/handles.hpp"
#include "sys/cuda.hpp"

namespace pgasdl {
namespace {

using namespace nb::literals;
using cuda::DeviceAttribute;

struct CudaDeviceInfo {
  int ordinal = 0;
  std::string name;
  std::string uuid;
  std::string pci_address;
  std::string compute_capability;
  std::uint64_t memory_bytes = 0;
  int multiprocessors = 0;
  bool virtual_memory = false;
  bool posix_handles = false;
  bool gpudirect = false;
  bool dmabuf = false;
  bool flushes_writes = false;
  int writes_ordering = 0;
  int numa_node = -1;
  std::vector<int> peers;
};

// In the form of nvidia-smi.
std::string written(const cuda::Uuid& uuid) {
  std::string out = "GPU";
  for (std::size_t i = 0; i < sizeof uuid.bytes; ++i) {
    std::array<char, 4> digits{};
    const bool dash = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
    std::snprintf(digits.data(), digits.size(), dash ? "-%02x" : "%02x",
                  static_cast<unsigned char>(uuid.bytes[i]));
    out += digits.data();
  }
  return out;
}

// In the form of the folders in /sys/bus/pci/devices.
std::string pci_address(cuda::Device device) {
  std::array<char, 32> out{};
  std::snprintf(out.data(), out.size(), "%04x:%02x:%02x.0",
                cuda::attribute(device, DeviceAttribute::kPciDomainId),
                cuda::attribute(device, DeviceAttribute::kPciBusId),
                cuda::attribute(device, DeviceAttribute::kPciDeviceId));
  return out.data();
}

CudaDeviceInfo describe(int ordinal) {
  const cuda::Driver& driver = cuda::driver();
  const std::string what = text("asking for CUDA device ", ordinal);
  cuda::Device device = 0;
  std::array<char, 256> name{};
  cuda::Uuid uuid{};
  std::size_t bytes = 0;
  cuda::check(driver.device_get(&device, ordinal), what);
  cuda::check(driver.device_get_name(name.data(), static_cast<int>(name.size()) - 1, device), what);
  cuda::check(driver.device_get_uuid(&uuid, device), what);
  cuda::check(driver.device_total_mem(&bytes, device), what);
  const auto get = [&](DeviceAttribute which) { return cuda::attribute(device, which); };
  CudaDeviceInfo info;
  info.ordinal = ordinal;
  info.name = name.data();
  info.uuid = written(uuid);
  info.pci_address = pci_address(device);
  info.compute_capability = text(get(DeviceAttribute::kComputeCapabilityMajor), ".",
                                 get(DeviceAttribute::kComputeCapabilityMinor));
  info.memory_bytes = bytes;
  info.multiprocessors = get(DeviceAttribute::kMultiprocessors);
  info.virtual_memory = get(DeviceAttribute::kVirtualMemoryManagement) != 0;
  info.posix_handles = get(DeviceAttribute::kHandleTypePosixFileDescriptor) != 0;
  info.gpudirect = get(DeviceAttribute::kGpuDirectRdmaWithVmm) != 0;
  info.dmabuf = get(DeviceAttribute::kDmaBuf) != 0;
  info.flushes_writes = get(DeviceAttribute::kGpuDirectRdmaFlushWrites) != 0;
  info.writes_ordering = get(DeviceAttribute::kGpuDirectRdmaWritesOrdering);
  int node = -1;
  // 0 is a node, so an attribute that the driver does not know must not read as 0.
  if (driver.device_get_attribute(&node, DeviceAttribute::kHostNumaId, device) == cuda::kSuccess) {
    info.numa_node = node;
  }
  for (int other = 0; other < cuda::device_count(); ++other) {
    cuda::Device peer = 0;
    int can = 0;
    cuda::check(driver.device_get(&peer, other), what);
    if (other != ordinal) cuda::check(driver.device_can_access_peer(&can, device, peer), what);
    if (can != 0) info.peers.push_back(other);
  }
  return info;
}

std::vector<CudaDeviceInfo> devices() {
  std::vector<CudaDeviceInfo> found;
  for (int ordinal = 0; ordinal < cuda::device_count(); ++ordinal) {
    found.push_back(describe(ordinal));
  }
  return found;
}

// Memory taken by DLPack, kept alive here.
struct DlpackMemory {
  nb::ndarray<nb::ro> array;

  bool contiguous() const {
    std::int64_t step = 1;
    for (std::size_t k = array.ndim(); k-- > 0;) {
      if (array.shape(k) != 1 && array.stride(k) != step) return array.size() == 0;
      step *= static_cast<std::int64_t>(array.shape(k));
    }
    return true;
  }
  nb::typed<nb::tuple, int, nb::ellipsis> shape() const {
    nb::list extents;
    for (std::size_t k = 0; k < array.ndim(); ++k) extents.append(array.shape(k));
    return nb::typed<nb::tuple, int, nb::ellipsis>(nb::tuple(extents));
  }
};

DlpackMemory take(nb::handle exporter, bool writable) {
  nb::ndarray<> changeable;
  if (writable && nb::try_cast(exporter, changeable, false)) {
    return {nb::ndarray<nb::ro>(changeable)};
  }
  nb::ndarray<nb::ro> constant;
  if (!writable && nb::try_cast(exporter, constant, false)) return {constant};
  throw Error(ErrorKind::kBuffer,
              text("its DLPack capsule cannot be taken", writable ? ", or is read-only" : ""));
}

}  // namespace

void bind_device(nb::module_& module) {
  nb::class_<CudaDeviceInfo>(module, "CudaDeviceInfo", "What the CUDA driver says of a GPU.")
      .def_ro("ordinal", &CudaDeviceInfo::ordinal)
      .def_ro("name", &CudaDeviceInfo::name)
      .def_ro("uuid", &CudaDeviceInfo::uuid)
      .def_ro("pci_address", &CudaDeviceInfo::pci_address)
      .def_ro("compute_capability", &CudaDeviceInfo::compute_capability)
      .def_ro("memory_bytes", &CudaDeviceInfo::memory_bytes)
      .def_ro("multiprocessors", &CudaDeviceInfo::multiprocessors)
      .def_ro("virtual_memory", &CudaDeviceInfo::virtual_memory)
      .def_ro("posix_handles", &CudaDeviceInfo::posix_handles)
      .def_ro("gpudirect", &CudaDeviceInfo::gpudirect)
      .def_ro("dmabuf", &CudaDeviceInfo::dmabuf)
      .def_ro("flushes_writes", &CudaDeviceInfo::flushes_writes)
      .def_ro("writes_ordering", &CudaDeviceInfo::writes_ordering)
      .def_ro("numa_node", &CudaDeviceInfo::numa_node)
      .def_ro("peers", &CudaDeviceInfo::peers);
  module.def("cuda_missing", &cuda::missing,
             "Why there is no CUDA device here; empty if there is.");
  module.def("cuda_device_count", &cuda::device_count,
             "The number of GPUs that this process sees; 0 without a driver.");
  module.def("cuda_devices", &devices, "Every GPU that this process sees, by ordinal.");
  module.def(
      "cuda_version",
      [] {
        int version = 0;
        cuda::check(cuda::driver().driver_get_version(&version), "cuDriverGetVersion");
        return text(version / 1000, ".", version % 1000 / 10);
      },
      "The newest CUDA that the driver runs.");
  module.def(
      "cuda_device_of",
      [](std::uintptr_t address) { return device_of(reinterpret_cast<const std::byte*>(address)); },
      "address"_a, "The GPU whose memory lies at an address.");
  module.def(
      "refuse_capture",
      [](int device, std::uintptr_t stream, const char* what) {
        refuse_capture({device, reinterpret_cast<cuda::Stream>(stream)}, what);
      },
      "device"_a, "stream"_a, "what"_a, "UnavailableError if the stream is recording a graph.");
  module.def(
      "device_capsule",
      [](nb::handle owner, std::uintptr_t address, std::size_t bytes, int device) {
        return nb::cast(nb::ndarray<>(reinterpret_cast<void*>(address), {bytes}, owner, {},
                                      nb::dtype<std::uint8_t>(), nb::device::cuda::value, device));
      },
      "owner"_a, "address"_a, "nbytes"_a, "device"_a,
      "Bytes of a GPU as a DLPack capsule, which keeps their owner.");
  nb::class_<DlpackMemory>(module, "DlpackMemory", "Memory taken by DLPack, which it keeps.")
      .def_prop_ro("address",
                   [](const DlpackMemory& self) {
                     return reinterpret_cast<std::uintptr_t>(self.array.data());
                   })
      .def_prop_ro("nbytes", [](const DlpackMemory& self) { return self.array.nbytes(); })
      .def_prop_ro("shape", &DlpackMemory::shape)
      .def_prop_ro("contiguous", &DlpackMemory::contiguous)
      .def_prop_ro("type_code", [](const DlpackMemory& self) { return self.array.dtype().code; })
      .def_prop_ro("type_bits", [](const DlpackMemory& self) { return self.array.dtype().bits; })
      .def_prop_ro("type_lanes", [](const DlpackMemory& self) { return self.array.dtype().lanes; })
      .def_prop_ro("device", [](const DlpackMemory& self) { return self.array.device_id(); });
  module.def("dlpack_memory", &take, "exporter"_a, "writable"_a,
             "Take the memory of an object by DLPack.");
}

}  // namespace pgasdl

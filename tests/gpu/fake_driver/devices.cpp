// Devices, their features, their primary contexts, and the names of errors.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#include "memory.hpp"

namespace fake_cuda {
namespace {

// Features that FAKE_LACKS may name, besides peer, ipc, stream-values and host-register.
struct Feature {
  DeviceAttribute attribute;
  const char* name;
  int value;
};
constexpr Feature kFeatures[] = {
    {DeviceAttribute::kUnifiedAddressing, "unified-addressing", 1},
    {DeviceAttribute::kCanUseHostPointerForRegisteredMem, "host-pointer", 1},
    {DeviceAttribute::kCanUseStreamWaitValueNor, "wait-value-nor", 1},
    {DeviceAttribute::kVirtualMemoryManagement, "vmm", 1},
    {DeviceAttribute::kHandleTypePosixFileDescriptor, "posix-handles", 1},
    {DeviceAttribute::kGpuDirectRdmaWithVmm, "rdma-with-vmm", 1},
    {DeviceAttribute::kGpuDirectRdmaFlushWrites, "flush-writes", 1},
    {DeviceAttribute::kGpuDirectRdmaWritesOrdering, "writes-ordering", 100},
    {DeviceAttribute::kDmaBuf, "dmabuf", 1},
};

struct Words {
  Result result;
  const char* name;
  const char* words;
};
constexpr Words kWords[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kDeinitialized, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {kStubLibrary, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kInvalidPtx, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {kNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {kDriverMismatch, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {kUnknown, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const Words* words_of(Result result) {
  for (const Words& one : kWords) {
    if (one.result == result) return &one;
  }
  return nullptr;
}

// The numbers of the visible devices among all devices.
const std::vector<int>& devices() {
  static const auto& all = *[] {
    auto* made = new std::vector<int>;
    const int n = static_cast<int>(environment_number("FAKE_DEVICES", 2));
    const char* selected = std::getenv("CUDA_VISIBLE_DEVICES");
    if (selected == nullptr) {
      for (int i = 0; i < n; ++i) made->push_back(i);
      return made;
    }
    // As in CUDA: up to the first invalid number.
    for (char* end = nullptr; *selected != 0; selected = *end == ',' ? end + 1 : end) {
      const long one = std::strtol(selected, &end, 10);
      if (end == selected || one < 0 || one >= n) break;
      made->push_back(static_cast<int>(one));
    }
    return made;
  }();
  return all;
}

bool is_device(Device device) { return device >= 0 && device < n_devices(); }

std::mutex context_mutex;

ContextObject& context_of(Device device) {
  static auto& all = *[] {
    auto* made = new std::deque<ContextObject>(devices().size());
    for (std::size_t i = 0; i < made->size(); ++i) (*made)[i].device = static_cast<int>(i);
    return made;
  }();
  return all[static_cast<std::size_t>(device)];
}

thread_local std::vector<Context> current;

}  // namespace

int n_devices() { return static_cast<int>(devices().size()); }
int physical(Device device) { return devices()[static_cast<std::size_t>(device)]; }
Device visible(int physical_device) {
  for (Device device = 0; device < n_devices(); ++device) {
    if (physical(device) == physical_device) return device;
  }
  return -1;
}

Context current_context() { return current.empty() ? nullptr : current.back(); }

Result init(unsigned flags) {
  if (const Result refused = enter(Entry::init, Needs::kNothing)) return refused;
  if (flags != 0) return kInvalidValue;
  if (n_devices() == 0) return kNoDevice;
  begin_driver();
  return kSuccess;
}

Result driver_get_version(int* version) {
  if (const Result refused = enter(Entry::driver_get_version, Needs::kNothing)) return refused;
  *version = 12040;
  return kSuccess;
}

Result get_error_name(Result result, const char** name) {
  const Words* found = words_of(result);
  *name = found == nullptr ? nullptr : found->name;
  return found == nullptr ? kInvalidValue : kSuccess;
}

Result get_error_string(Result result, const char** words) {
  const Words* found = words_of(result);
  *words = found == nullptr ? nullptr : found->words;
  return found == nullptr ? kInvalidValue : kSuccess;
}

Result device_get_count(int* count) {
  if (const Result refused = enter(Entry::device_get_count, Needs::kDriver)) return refused;
  *count = n_devices();
  return kSuccess;
}

Result device_get(Device* device, int ordinal) {
  if (const Result refused = enter(Entry::device_get, Needs::kDriver)) return refused;
  if (!is_device(ordinal)) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

Result device_get_name(char* name, int length, Device device) {
  if (const Result refused = enter(Entry::device_get_name, Needs::kDriver)) return refused;
  if (!is_device(device)) return kInvalidDevice;
  if (length <= 0) return kInvalidValue;
  std::snprintf(name, static_cast<std::size_t>(length), "Fake %d", physical(device));
  return kSuccess;
}

Result device_get_uuid(Uuid* uuid, Device device) {
  if (const Result refused = enter(Entry::device_get_uuid, Needs::kDriver)) return refused;
  if (!is_device(device)) return kInvalidDevice;
  std::memcpy(uuid->bytes, "the fake device", sizeof uuid->bytes);
  uuid->bytes[15] = static_cast<char>(physical(device));
  return kSuccess;
}

Result device_get_attribute(int* value, DeviceAttribute attribute, Device device) {
  if (const Result refused = enter(Entry::device_get_attribute, Needs::kDriver)) return refused;
  if (!is_device(device)) return kInvalidDevice;
  for (const Feature& feature : kFeatures) {
    if (feature.attribute != attribute) continue;
    *value = lacks(feature.name) ? 0 : feature.value;
    return kSuccess;
  }
  switch (attribute) {
    case DeviceAttribute::kMultiprocessors:
      *value = 8;
      return kSuccess;
    case DeviceAttribute::kPciBusId:
      *value = 16 + physical(device);
      return kSuccess;
    case DeviceAttribute::kPciDeviceId:
    case DeviceAttribute::kPciDomainId:
    case DeviceAttribute::kComputeCapabilityMinor:
    case DeviceAttribute::kHostNumaId:
      *value = 0;
      return kSuccess;
    case DeviceAttribute::kComputeCapabilityMajor:
      *value = 9;
      return kSuccess;
    default:
      return kInvalidValue;
  }
}

Result device_total_mem(std::size_t* bytes, Device device) {
  if (const Result refused = enter(Entry::device_total_mem, Needs::kDriver)) return refused;
  if (!is_device(device)) return kInvalidDevice;
  *bytes = environment_number("FAKE_MEMORY", std::uint64_t{8} << 30);
  return kSuccess;
}

Result device_can_access_peer(int* can, Device device, Device peer) {
  if (const Result refused = enter(Entry::device_can_access_peer, Needs::kDriver)) return refused;
  if (!is_device(device) || !is_device(peer)) return kInvalidDevice;
  *can = device != peer && !lacks("peer");
  return kSuccess;
}

Result ctx_enable_peer_access(Context peer, unsigned flags) {
  if (const Result refused = enter(Entry::ctx_enable_peer_access, Needs::kContext)) return refused;
  const Device device = current_context()->device;
  if (flags != 0 || peer == nullptr || peer->device == device) return kInvalidValue;
  if (lacks("peer")) return kPeerAccessUnsupported;
  const std::scoped_lock lock(memory().mutex);
  return memory().open_peer(device, peer->device) ? kSuccess : kPeerAccessAlreadyEnabled;
}

Result primary_ctx_retain(Context* context, Device device) {
  if (const Result refused = enter(Entry::primary_ctx_retain, Needs::kDriver)) return refused;
  if (!is_device(device)) return kInvalidDevice;
  const std::scoped_lock lock(context_mutex);
  *context = &context_of(device);
  ++(*context)->n_retained;
  return kSuccess;
}

Result primary_ctx_release(Device device) {
  if (const Result refused = enter(Entry::primary_ctx_release, Needs::kDriver)) return refused;
  if (!is_device(device)) return kInvalidDevice;
  const std::scoped_lock lock(context_mutex);
  if (context_of(device).n_retained == 0) return kInvalidContext;
  --context_of(device).n_retained;
  return kSuccess;
}

Result ctx_get_stream_priority_range(int* least, int* greatest) {
  if (const Result refused = enter(Entry::ctx_get_stream_priority_range, Needs::kContext)) {
    return refused;
  }
  *least = 0;
  *greatest = -5;
  return kSuccess;
}

Result ctx_push(Context context) {
  if (const Result refused = enter(Entry::ctx_push, Needs::kDriver)) return refused;
  const std::scoped_lock lock(context_mutex);
  for (Device device = 0; device < n_devices(); ++device) {
    if (context != &context_of(device) || context->n_retained == 0) continue;
    current.push_back(context);
    return kSuccess;
  }
  return kInvalidContext;
}

Result ctx_pop(Context* context) {
  if (const Result refused = enter(Entry::ctx_pop, Needs::kDriver)) return refused;
  if (current.empty()) return kInvalidContext;
  if (context != nullptr) *context = current.back();
  current.pop_back();
  return kSuccess;
}

}  // namespace fake_cuda

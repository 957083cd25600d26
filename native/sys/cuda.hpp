// The CUDA driver, loaded at run time: the entries that this library calls, each under the name of
// the wanted version, with declarations of our own. Nothing links CUDA, and building needs none of
// its headers. Each entry behaves as cuda.h says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pgasdl::cuda {

using Result = int;
using Device = int;
using DevicePtr = std::uint64_t;
using AllocationHandle = unsigned long long;
using Context = struct ContextObject*;
using Stream = struct StreamObject*;
using Event = struct EventObject*;
using Module = struct ModuleObject*;
using Function = struct FunctionObject*;
using HostFunction = void (*)(void* argument);

// An address as the driver's calls take it.
inline DevicePtr pointer(const void* address) { return reinterpret_cast<DevicePtr>(address); }

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;  // also in the child of a process that used CUDA
inline constexpr Result kDeinitialized = 4;
inline constexpr Result kStubLibrary = 34;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kNotReady = 600;
inline constexpr Result kPeerAccessAlreadyEnabled = 704;
inline constexpr Result kAlreadyRegistered = 712;  // of host memory
inline constexpr Result kNotSupported = 801;
inline constexpr Result kDriverMismatch = 803;
inline constexpr Result kUnknown = 999;

// CUmemLocation, CUmemAllocationProp, CUmemAccessDesc, CUipcMemHandle, CUuuid.
struct MemLocation {
  int type = 1;  // a device
  int id = 0;
};
struct MemAllocationProp {
  int type = 1;                    // pinned
  int requested_handle_types = 1;  // a POSIX file descriptor
  MemLocation location;
  void* win32_meta_data = nullptr;
  struct {
    unsigned char compression_type = 0;
    unsigned char gpu_direct_rdma_capable = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  } flags;
};
struct MemAccessDesc {
  MemLocation location;
  int flags = 3;  // read and write
};
struct IpcMemHandle {
  char reserved[64];
};
struct Uuid {
  char bytes[16];
};

// CUdevice_attribute, as far as this library asks.
enum class DeviceAttribute : int {
  kMultiprocessors = 16,
  kPciBusId = 33,
  kPciDeviceId = 34,
  kPciDomainId = 50,
  kUnifiedAddressing = 41,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kCanUseHostPointerForRegisteredMem = 91,
  kCanUseStreamWaitValueNor = 123,
  kVirtualMemoryManagement = 102,
  kHandleTypePosixFileDescriptor = 103,
  kGpuDirectRdmaWithVmm = 110,
  kGpuDirectRdmaFlushWrites = 117,
  kGpuDirectRdmaWritesOrdering = 118,
  kDmaBuf = 124,
  kHostNumaId = 134,
};
// CUpointer_attribute.
enum class PointerAttribute : int {
  kMemoryType = 2,  // 1: host, 2: device
  kSyncMemops = 6,
  kDeviceOrdinal = 9,
  kIsLegacyCudaIpcCapable = 10,
  kRangeStart = 11,
  kRangeSize = 12,
  kAllowedHandleTypes = 14,
};

inline constexpr int kCaptureModeRelaxed = 2;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kHostRegisterPortable = 1;
inline constexpr unsigned kHostRegisterDeviceMap = 2;
inline constexpr unsigned kWaitValueGeq = 0;
inline constexpr unsigned kWaitValueEq = 1;
inline constexpr unsigned kWriteValueDefault = 0;
inline constexpr int kHandlePosixFileDescriptor = 1;
inline constexpr int kRangeHandleDmaBuf = 1;
inline constexpr int kGranularityMinimum = 0;
inline constexpr unsigned kIpcLazyEnablePeerAccess = 1;

// X(member, the library's name, parameters); all return a Result.
#define PGASDL_CUDA_FUNCTIONS(X)                                                                   \
  X(init, "cuInit", (unsigned flags))                                                              \
  X(driver_get_version, "cuDriverGetVersion", (int* version))                                      \
  X(get_error_name, "cuGetErrorName", (Result result, const char** name))                          \
  X(get_error_string, "cuGetErrorString", (Result result, const char** words))                     \
  X(device_get_count, "cuDeviceGetCount", (int* count))                                            \
  X(device_get, "cuDeviceGet", (Device * device, int ordinal))                                     \
  X(device_get_name, "cuDeviceGetName", (char* name, int length, Device device))                   \
  X(device_get_uuid, "cuDeviceGetUuid_v2", (Uuid * uuid, Device device))                           \
  X(device_get_attribute, "cuDeviceGetAttribute",                                                  \
    (int* value, DeviceAttribute attribute, Device device))                                        \
  X(device_total_mem, "cuDeviceTotalMem_v2", (std::size_t* bytes, Device device))                  \
  X(device_can_access_peer, "cuDeviceCanAccessPeer", (int* can, Device device, Device peer))       \
  X(primary_ctx_retain, "cuDevicePrimaryCtxRetain", (Context * context, Device device))            \
  X(primary_ctx_release, "cuDevicePrimaryCtxRelease_v2", (Device device))                          \
  X(ctx_push, "cuCtxPushCurrent_v2", (Context context))                                            \
  X(ctx_pop, "cuCtxPopCurrent_v2", (Context * context))                                            \
  X(ctx_enable_peer_access, "cuCtxEnablePeerAccess", (Context peer, unsigned flags))               \
  X(ctx_get_stream_priority_range, "cuCtxGetStreamPriorityRange", (int* least, int* greatest))     \
  X(thread_exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (int* mode))                \
  X(mem_get_granularity, "cuMemGetAllocationGranularity",                                          \
    (std::size_t* granularity, const MemAllocationProp* properties, int option))                   \
  X(mem_create, "cuMemCreate",                                                                     \
    (AllocationHandle * handle, std::size_t bytes, const MemAllocationProp* properties,            \
     unsigned long long flags))                                                                    \
  X(mem_release, "cuMemRelease", (AllocationHandle handle))                                        \
  X(mem_export, "cuMemExportToShareableHandle",                                                    \
    (void* shareable, AllocationHandle handle, int type, unsigned long long flags))                \
  X(mem_import, "cuMemImportFromShareableHandle",                                                  \
    (AllocationHandle * handle, void* shareable, int type))                                        \
  X(mem_retain, "cuMemRetainAllocationHandle", (AllocationHandle * handle, void* address))         \
  X(mem_address_reserve, "cuMemAddressReserve",                                                    \
    (DevicePtr * address, std::size_t bytes, std::size_t alignment, DevicePtr hint,                \
     unsigned long long flags))                                                                    \
  X(mem_address_free, "cuMemAddressFree", (DevicePtr address, std::size_t bytes))                  \
  X(mem_map, "cuMemMap",                                                                           \
    (DevicePtr address, std::size_t bytes, std::size_t offset, AllocationHandle handle,            \
     unsigned long long flags))                                                                    \
  X(mem_unmap, "cuMemUnmap", (DevicePtr address, std::size_t bytes))                               \
  X(mem_set_access, "cuMemSetAccess",                                                              \
    (DevicePtr address, std::size_t bytes, const MemAccessDesc* access, std::size_t count))        \
  X(mem_alloc, "cuMemAlloc_v2", (DevicePtr * address, std::size_t bytes))                          \
  X(mem_free, "cuMemFree_v2", (DevicePtr address))                                                 \
  X(mem_get_address_range, "cuMemGetAddressRange_v2",                                              \
    (DevicePtr * base, std::size_t* bytes, DevicePtr address))                                     \
  X(ipc_get_mem_handle, "cuIpcGetMemHandle", (IpcMemHandle * handle, DevicePtr address))           \
  X(ipc_open_mem_handle, "cuIpcOpenMemHandle_v2",                                                  \
    (DevicePtr * address, IpcMemHandle handle, unsigned flags))                                    \
  X(ipc_close_mem_handle, "cuIpcCloseMemHandle", (DevicePtr address))                              \
  X(pointer_get_attribute, "cuPointerGetAttribute",                                                \
    (void* value, PointerAttribute attribute, DevicePtr address))                                  \
  X(mem_host_register, "cuMemHostRegister_v2", (void* address, std::size_t bytes, unsigned flags)) \
  X(mem_host_unregister, "cuMemHostUnregister", (void* address))                                   \
  X(mem_host_get_device_pointer, "cuMemHostGetDevicePointer_v2",                                   \
    (DevicePtr * device_address, void* address, unsigned flags))                                   \
  X(memcpy_async, "cuMemcpyAsync",                                                                 \
    (DevicePtr to, DevicePtr from, std::size_t bytes, Stream stream))                              \
  X(memset_async, "cuMemsetD8Async",                                                               \
    (DevicePtr address, unsigned char value, std::size_t bytes, Stream stream))                    \
  X(stream_create, "cuStreamCreateWithPriority", (Stream * stream, unsigned flags, int priority))  \
  X(stream_destroy, "cuStreamDestroy_v2", (Stream stream))                                         \
  X(stream_query, "cuStreamQuery", (Stream stream))                                                \
  X(stream_synchronize, "cuStreamSynchronize", (Stream stream))                                    \
  X(stream_is_capturing, "cuStreamIsCapturing", (Stream stream, int* status))                      \
  X(stream_wait_event, "cuStreamWaitEvent", (Stream stream, Event event, unsigned flags))          \
  X(stream_wait_value, "cuStreamWaitValue32_v2",                                                   \
    (Stream stream, DevicePtr address, std::uint32_t value, unsigned flags))                       \
  X(stream_write_value, "cuStreamWriteValue32_v2",                                                 \
    (Stream stream, DevicePtr address, std::uint32_t value, unsigned flags))                       \
  X(event_create, "cuEventCreate", (Event * event, unsigned flags))                                \
  X(event_record, "cuEventRecord", (Event event, Stream stream))                                   \
  X(event_query, "cuEventQuery", (Event event))                                                    \
  X(event_synchronize, "cuEventSynchronize", (Event event))                                        \
  X(event_destroy, "cuEventDestroy_v2", (Event event))                                             \
  X(module_load_data, "cuModuleLoadData", (Module * module, const void* image))                    \
  X(module_unload, "cuModuleUnload", (Module module))                                              \
  X(module_get_function, "cuModuleGetFunction",                                                    \
    (Function * function, Module module, const char* name))                                        \
  X(launch_kernel, "cuLaunchKernel",                                                               \
    (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,       \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream, void** parameters,  \
     void** extra))                                                                                \
  X(launch_host_func, "cuLaunchHostFunc", (Stream stream, HostFunction function, void* argument))
// Null if the driver lacks them: then there is no RDMA from device memory.
#define PGASDL_CUDA_OPTIONAL_FUNCTIONS(X)                                                     \
  X(mem_get_handle_for_range, "cuMemGetHandleForAddressRange",                                \
    (void* handle, DevicePtr address, std::size_t bytes, int type, unsigned long long flags)) \
  X(flush_gpu_direct_rdma_writes, "cuFlushGPUDirectRDMAWrites", (int target, int scope))

struct Driver {
#define PGASDL_MEMBER(member, name, parameters) Result(*member) parameters = nullptr;
  PGASDL_CUDA_FUNCTIONS(PGASDL_MEMBER)
  PGASDL_CUDA_OPTIONAL_FUNCTIONS(PGASDL_MEMBER)
#undef PGASDL_MEMBER
};

// Loads libcuda.so.1 and initialises it at the first call; the next call repeats a failed attempt.
// Throws kUnavailable with the reason: no driver, too old a driver, no device. Also throws in a
// child of a process that used it, since CUDA does not survive a fork.
const Driver& driver();

// Why there is no driver here; empty if there is one.
std::string missing();

// The number of devices that this process sees; 0 without a driver.
int device_count();

// An attribute of a device, 0 if the driver does not know it.
int attribute(Device device, DeviceAttribute which);

// The device context that PyTorch and CuPy also use, retained from first use until the process
// ends.
Context primary_context(Device device);

// Throws for any result except success: what was attempted, and the driver's name and text for the
// error. kUnavailable if the driver does not support it, else kSystem, also for lack of memory.
void check(Result result, const std::string& what);

// Makes a device's primary context this thread's current one for a scope. Calls in the scope are
// not recorded in a graph that some thread captures meanwhile, and do not invalidate it.
class Current {
 public:
  explicit Current(Device device);
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current();

 private:
  int capture_mode_ = kCaptureModeRelaxed;  // outside the scope: this thread's mode before
};

}  // namespace pgasdl::cuda

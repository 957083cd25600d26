// The CUDA driver's loader and the fake driver. Without an argument, tests what must hold with a
// correct fake driver. With one, runs a part that tests/gpu/test_fake_driver.py starts with another
// driver, or that ends the process.

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "sys/cuda.hpp"
#include "sys/error.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::cuda;

constexpr std::size_t kBytes = std::size_t{2} << 20;
constexpr const char* kPtx = ".version 7.0\n.target sm_80\n.visible .entry fake_add()\n";
constexpr Result kInvalidContext = 201;
constexpr Result kInvalidHandle = 400;
constexpr Result kNotFound = 500;
constexpr Result kIllegalAddress = 700;
constexpr Result kNotRegistered = 713;
constexpr Result kNotPermitted = 800;
constexpr Result kCaptureUnsupported = 900;

void done(Result result) {
  const char* name = "";
  if (result != kSuccess) driver().get_error_name(result, &name);
  CHECK_NOTE(result == kSuccess, "%d %s", result, name);
}

template <typename Function>
Function from_the_driver(const char* name) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  CHECK(library != nullptr);
  return reinterpret_cast<Function>(dlsym(library, name));
}

std::string live() { return from_the_driver<const char* (*)()>("fakeLive")(); }

// Physical memory of a device at an address.
struct Block {
  explicit Block(Device device = 0) {
    MemAllocationProp properties;
    properties.location.id = device;
    done(driver().mem_create(&handle, kBytes, &properties, 0));
    done(driver().mem_address_reserve(&address, kBytes, 0, 0, 0));
    done(driver().mem_map(address, kBytes, 0, handle, 0));
    MemAccessDesc access;
    access.location.id = device;
    done(driver().mem_set_access(address, kBytes, &access, 1));
  }
  ~Block() {
    done(driver().mem_unmap(address, kBytes));
    done(driver().mem_address_free(address, kBytes));
    done(driver().mem_release(handle));
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  AllocationHandle handle = 0;
  DevicePtr address = 0;
};

struct OwnStream {
  OwnStream() { done(driver().stream_create(&stream, kStreamNonBlocking, 0)); }
  ~OwnStream() { driver().stream_destroy(stream); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  void synchronize() { done(driver().stream_synchronize(stream)); }
  bool idle() {
    const Result result = driver().stream_query(stream);
    CHECK(result == kSuccess || result == kNotReady);
    return result == kSuccess;
  }

  Stream stream = nullptr;
};

struct OwnEvent {
  OwnEvent() { done(driver().event_create(&event, kEventDisableTiming)); }
  ~OwnEvent() { driver().event_destroy(event); }
  OwnEvent(const OwnEvent&) = delete;
  OwnEvent& operator=(const OwnEvent&) = delete;

  Event event = nullptr;
};

// Host memory that devices reach.
template <typename Element, std::size_t n>
struct Pinned {
  Pinned() {
    done(driver().mem_host_register(host.data(), sizeof host,
                                    kHostRegisterPortable | kHostRegisterDeviceMap));
    done(driver().mem_host_get_device_pointer(&device, host.data(), 0));
  }
  ~Pinned() { driver().mem_host_unregister(host.data()); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  alignas(4096) std::array<Element, n> host{};
  DevicePtr device = 0;
};

using Numbers = Pinned<std::uint32_t, 1024>;
using Word = Pinned<std::atomic<std::uint32_t>, 1>;

struct Adder {
  Adder() {
    done(driver().module_load_data(&module, kPtx));
    done(driver().module_get_function(&function, module, "fake_add"));
  }
  ~Adder() { driver().module_unload(module); }
  Adder(const Adder&) = delete;
  Adder& operator=(const Adder&) = delete;

  Result operator()(DevicePtr numbers, std::uint32_t count, std::uint32_t summand, Stream stream) {
    void* parameters[] = {&numbers, &count, &summand};
    return driver().launch_kernel(function, 1, 1, 1, 256, 1, 1, 0, stream, parameters, nullptr);
  }

  Module module = nullptr;
  Function function = nullptr;
};

DevicePtr address_of(const void* host) { return reinterpret_cast<DevicePtr>(host); }

void tells_about_devices() {
  CHECK(missing().empty());
  CHECK(device_count() == 2);
  CHECK(attribute(1, DeviceAttribute::kVirtualMemoryManagement) == 1);
  CHECK(attribute(0, static_cast<DeviceAttribute>(9999)) == 0);
  char name[32];
  done(driver().device_get_name(name, sizeof name, 1));
  CHECK(std::strcmp(name, "Fake 1") == 0);
  Uuid uuids[2];
  for (Device device : {0, 1}) done(driver().device_get_uuid(&uuids[device], device));
  CHECK(std::memcmp(&uuids[0], &uuids[1], sizeof(Uuid)) != 0);
}

template <typename Call>
void fails(ErrorKind kind, const std::string& words, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK_NOTE(error.kind() == kind && std::string(error.what()).find(words) != std::string::npos,
               "%s", error.what());
    return;
  }
  CHECK_NOTE(false, "no error: %s", words.c_str());
}

void results_become_errors() {
  check(kSuccess, "nothing");
  fails(ErrorKind::kSystem, "a try: CUDA_ERROR_OUT_OF_MEMORY: out of memory (2)",
        [] { check(kOutOfMemory, "a try"); });
  fails(ErrorKind::kUnavailable, "CUDA_ERROR_NOT_SUPPORTED", [] { check(kNotSupported, "a try"); });
  fails(ErrorKind::kSystem, "(12345)", [] { check(12345, "a try"); });
  fails(ErrorKind::kSystem, "attribute 16 of CUDA device 7",
        [] { attribute(7, DeviceAttribute::kMultiprocessors); });
  fails(ErrorKind::kUnavailable, "there is no CUDA device 2: this process sees 2",
        [] { const Current current(2); });
}

void contexts_nest() {
  DevicePtr address = 0;
  CHECK(driver().mem_alloc(&address, 64) == kInvalidContext);
  const Current outer(0);
  Context first = nullptr;
  Context second = nullptr;
  {
    const Current inner(1);
    done(driver().mem_alloc(&address, 64));
    int device = -1;
    done(driver().pointer_get_attribute(&device, PointerAttribute::kDeviceOrdinal, address));
    CHECK(device == 1);
    done(driver().mem_free(address));
    done(driver().ctx_pop(&second));
    done(driver().ctx_push(second));
  }
  done(driver().ctx_pop(&first));
  CHECK(first != nullptr && first != second);
  done(driver().ctx_push(first));
  std::thread other([] {
    Stream stream = nullptr;
    CHECK(driver().stream_create(&stream, 0, 0) == kInvalidContext);
    const Current here(0);
    done(driver().stream_create(&stream, 0, 0));
    done(driver().stream_destroy(stream));
  });
  other.join();
}

void memory_is_not_zero() {
  const Current current(0);
  const Block block;
  std::uint32_t number = 0;
  done(driver().memcpy_async(address_of(&number), block.address, sizeof number, nullptr));
  CHECK(number != 0);
}

void wrong_use_of_memory_is_refused() {
  const Current current(0);
  OwnStream stream;
  std::uint32_t number = 0;
  auto block = std::make_unique<Block>();
  const DevicePtr address = block->address;
  const auto copy = [&](DevicePtr from, std::size_t bytes) {
    return driver().memcpy_async(address, from, bytes, stream.stream);
  };
  CHECK(copy(address + kBytes - 8, 16) == kInvalidValue);
  CHECK(copy(address - 8, 8) == kInvalidValue);
  CHECK(driver().memset_async(address_of(&number), 0, 4, stream.stream) == kInvalidValue);
  CHECK(driver().mem_address_free(address, kBytes) == kInvalidValue);
  CHECK(driver().mem_unmap(address, kBytes / 2) == kInvalidValue);
  CHECK(driver().mem_map(address, kBytes, 0, block->handle, 0) == kInvalidValue);
  MemAllocationProp properties;
  AllocationHandle handle = 0;
  CHECK(driver().mem_create(&handle, kBytes + 4096, &properties, 0) == kInvalidValue);
  CHECK(driver().mem_create(&handle, kBytes << 20, &properties, 0) == kOutOfMemory);
  IpcMemHandle legacy;
  CHECK(driver().ipc_get_mem_handle(&legacy, address) == kInvalidValue);
  {
    const Current other(1);  // without access to the memory
    OwnStream there;
    CHECK(driver().memcpy_async(address, address + 8, 8, there.stream) == kInvalidValue);
  }
  block.reset();
  CHECK(copy(address, 8) == kInvalidValue);
  // An allocation ends at its last byte.
  DevicePtr small = 0;
  done(driver().mem_alloc(&small, 100));
  done(driver().memset_async(small, 1, 100, stream.stream));
  CHECK(driver().memset_async(small, 1, 101, stream.stream) == kInvalidValue);
  CHECK(driver().mem_free(small + 4) == kInvalidValue);
  stream.synchronize();
  done(driver().mem_free(small));
}

void host_memory_has_to_be_registered() {
  const Current current(0);
  OwnStream stream;
  Adder add;
  alignas(8) std::array<std::uint32_t, 4> own{1, 2, 3, 4};
  CHECK(driver().stream_write_value(stream.stream, address_of(own.data()), 1, 0) == kInvalidValue);
  CHECK(driver().mem_host_unregister(own.data()) == kNotRegistered);
  Numbers numbers;
  CHECK(driver().mem_host_register(numbers.host.data() + 8, 8, 0) == kAlreadyRegistered);
  done(add(numbers.device, 1024, 5, stream.stream));
  // Pageable memory is copied before the call returns.
  done(driver().memcpy_async(address_of(own.data()), numbers.device + 16, 16, stream.stream));
  CHECK(own[0] == 5 && own[3] == 5);
  unsigned type = 0;
  done(driver().pointer_get_attribute(&type, PointerAttribute::kMemoryType, numbers.device));
  CHECK(type == 1);
  CHECK(driver().pointer_get_attribute(&type, PointerAttribute::kMemoryType,
                                       address_of(own.data())) == kInvalidValue);
}

void the_null_stream_waits_for_others() {
  const Current current(0);
  Adder add;
  Numbers numbers;
  Stream blocking = nullptr;
  done(driver().stream_create(&blocking, 0, 0));
  for (int round = 0; round < 10; ++round) {
    done(add(numbers.device, 1024, 1, blocking));
    done(add(numbers.device, 1024, 1, nullptr));
  }
  done(driver().stream_synchronize(nullptr));
  CHECK(numbers.host[7] == 20);
  done(driver().stream_destroy(blocking));
}

// Neither destroying a stream nor the end of the process waits for a flag that never comes.
void a_stream_that_waits_can_be_destroyed() {
  const Current current(0);
  static Word& never = *new Word;
  OwnStream stream;
  done(driver().stream_wait_value(stream.stream, never.device, 1, kWaitValueEq));
}

void modules_are_checked() {
  const Current current(0);
  Module module = nullptr;
  CHECK(driver().module_load_data(&module, "nonsense") == 200);
  Adder add;
  Function function = nullptr;
  CHECK(driver().module_get_function(&function, add.module, "other") == kNotFound);
  OwnStream stream;
  CHECK(driver().launch_kernel(add.function, 1, 1, 1, 2048, 1, 1, 0, stream.stream, nullptr,
                               nullptr) == kInvalidValue);
  const Current other(1);
  OwnStream there;
  CHECK(add(0, 0, 0, there.stream) == kInvalidHandle);
}

void host_functions_may_not_call_the_driver() {
  const Current current(0);
  OwnStream stream;
  struct Seen {
    std::thread::id thread;
    Result result = kSuccess;
  } seen;
  done(driver().launch_host_func(
      stream.stream,
      [](void* argument) {
        auto& told = *static_cast<Seen*>(argument);
        told.thread = std::this_thread::get_id();
        int count = 0;
        told.result = driver().device_get_count(&count);
      },
      &seen));
  stream.synchronize();
  CHECK(seen.result == kNotPermitted && seen.thread != std::this_thread::get_id());
}

void capturing_streams_say_so() {
  const Current current(0);
  OwnStream stream;
  int status = -1;
  done(driver().stream_is_capturing(stream.stream, &status));
  CHECK(status == 0);
  const auto set = from_the_driver<int (*)(Stream, int)>("fakeSetCapturing");
  done(set(stream.stream, 1));
  done(driver().stream_is_capturing(stream.stream, &status));
  CHECK(status == 1);
  CHECK(driver().stream_synchronize(stream.stream) == kCaptureUnsupported);
  done(set(stream.stream, 0));
  stream.synchronize();
}

void memory_can_be_had_as_descriptor() {
  const Current current(0);
  int file = -1;
  DevicePtr address = 0;
  done(driver().mem_alloc(&address, 8192));
  done(driver().mem_get_handle_for_range(&file, address, 4096, kRangeHandleDmaBuf, 0));
  close(file);
  CHECK(driver().mem_get_handle_for_range(&file, address + 8, 4096, kRangeHandleDmaBuf, 0) ==
        kInvalidValue);
  IpcMemHandle handle;
  done(driver().ipc_get_mem_handle(&handle, address));
  CHECK(driver().ipc_open_mem_handle(&address, handle, 1) == kInvalidContext);  // in this process
  done(driver().mem_free(address));
}

void nothing_is_left() {
  CHECK_NOTE(live() ==
                 "{\"allocations\": 0, \"handles\": 0, \"reservations\": 0, \"mappings\": 0, "
                 "\"registrations\": 1, \"streams\": 0, \"events\": 0, \"modules\": 0}",
             "%s", live().c_str());  // the flag that never comes stays registered
}

void all() {
  tells_about_devices();
  results_become_errors();
  contexts_nest();
  memory_is_not_zero();
  wrong_use_of_memory_is_refused();
  host_memory_has_to_be_registered();
  the_null_stream_waits_for_others();
  modules_are_checked();
  host_functions_may_not_call_the_driver();
  capturing_streams_say_so();
  memory_can_be_had_as_descriptor();
  a_stream_that_waits_can_be_destroyed();
  nothing_is_left();
}

// ---- Parts for other drivers and other processes.

void loads() {
  const std::string why = missing();
  if (!why.empty()) {
    std::printf("missing: %s\n", why.c_str());
  } else {
    std::printf("%d device(s)\n", device_count());
  }
}

void loads_twice() {
  loads();
  loads();
}

void forks() {
  driver();
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    loads();
    fails(ErrorKind::kUnavailable, "CUDA does not outlive a fork",
          [] { const Current current(0); });
    int count = 0;
    const auto get_count = from_the_driver<Result (*)(int*)>("cuDeviceGetCount");
    std::printf("the driver itself: %d\n", get_count(&count));
    std::fflush(stdout);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

void creates() {
  const Current current(0);
  const Block block;
  std::printf("created\n");
}

// Makes each feature's first call; features without a call have only their attribute.
void tries() {
  const Current current(0);
  OwnStream stream;
  static std::array<std::uint32_t, 4> own{};
  const Result registered = driver().mem_host_register(own.data(), sizeof own, 0);
  std::printf("host-register %d\n", registered);
  std::printf("stream-values %d\n",
              driver().stream_write_value(stream.stream, address_of(own.data()), 1, 0));
  std::printf("wait-value-nor %d\n",
              driver().stream_wait_value(stream.stream, address_of(own.data()), 1, 3));
  stream.synchronize();
  if (registered == kSuccess) done(driver().mem_host_unregister(own.data()));
  DevicePtr address = 0;
  IpcMemHandle handle;
  int file = -1;
  done(driver().mem_alloc(&address, 4096));
  std::printf("ipc %d\n", driver().ipc_get_mem_handle(&handle, address));
  std::printf("dmabuf %d\n", driver().mem_get_handle_for_range(&file, address, 4096, 1, 0));
  done(driver().mem_free(address));
  if (file >= 0) close(file);
  std::printf("flush-writes %d\n", driver().flush_gpu_direct_rdma_writes(0, 0));
  int can = -1;
  done(driver().device_can_access_peer(&can, 0, 1));
  std::printf("peer %d\n", can == 1 ? kSuccess : kNotSupported);
  MemAllocationProp properties;
  properties.flags.gpu_direct_rdma_capable = 1;
  AllocationHandle block = 0;
  const Result created = driver().mem_create(&block, kBytes, &properties, 0);
  if (created == kSuccess) done(driver().mem_release(block));
  std::printf("rdma-with-vmm %d\n", created);
}

void host_touches() {
  const Block block;
  std::fprintf(stderr, "touching\n");
  std::printf("%d\n", *reinterpret_cast<volatile int*>(block.address));
}

// A kernel that touches memory that it cannot reach ends the context.
void kernel_touches() {
  const Current current(0);
  std::vector<std::uint32_t> own(1024);
  Adder add;
  OwnStream stream;
  done(add(address_of(own.data()), 1024, 1, stream.stream));
  CHECK(driver().stream_synchronize(stream.stream) == kIllegalAddress);
  DevicePtr address = 0;
  CHECK(driver().mem_alloc(&address, 64) == kIllegalAddress);
  const Current other(1);
  done(driver().mem_alloc(&address, 64));
  std::printf("refused\n");
}

// Counts how often a stream was too early, without a wait for another stream and with one.
void forgets_to_wait() {
  const Current current(0);
  Adder add;
  Numbers numbers;
  Numbers copies;
  OwnEvent event;
  OwnStream first;
  OwnStream second;
  int n_early[2] = {0, 0};
  for (std::uint32_t round = 1; round <= 40; ++round) {
    const bool waits = round % 2 == 0;
    done(add(numbers.device, 1024, 1, first.stream));
    done(driver().event_record(event.event, first.stream));
    if (waits) done(driver().stream_wait_event(second.stream, event.event, 0));
    done(driver().memcpy_async(copies.device, numbers.device, sizeof copies.host, second.stream));
    second.synchronize();
    first.synchronize();
    n_early[waits] += copies.host[0] != round;
  }
  std::printf("too early: %s without, %d with\n", n_early[0] > 0 ? "some" : "none", n_early[1]);
}

// The other process's part of legacy sharing: the first one writes, this one adds.
void shares() {
  int pipes[2][2];
  CHECK(pipe(pipes[0]) == 0 && pipe(pipes[1]) == 0);
  IpcMemHandle handle;
  std::uint32_t number = 0;
  const pid_t child = fork();
  if (child == 0) {
    CHECK(read(pipes[0][0], &handle, sizeof handle) == sizeof handle);
    const Current current(1);
    DevicePtr address = 0;
    DevicePtr again = 0;
    done(driver().ipc_open_mem_handle(&address, handle, kIpcLazyEnablePeerAccess));
    done(driver().ipc_open_mem_handle(&again, handle, kIpcLazyEnablePeerAccess));
    CHECK(again == address);
    Adder add;
    done(add(address, 16, 3, nullptr));
    done(driver().stream_synchronize(nullptr));
    for (int i = 0; i < 2; ++i) done(driver().ipc_close_mem_handle(address));
    CHECK(driver().ipc_close_mem_handle(address) == kInvalidValue);
    CHECK(write(pipes[1][1], "", 1) == 1);
    _exit(0);
  }
  const Current current(0);
  DevicePtr address = 0;
  done(driver().mem_alloc(&address, 64));
  done(driver().memset_async(address, 0, 64, nullptr));
  done(driver().stream_synchronize(nullptr));
  done(driver().ipc_get_mem_handle(&handle, address));
  CHECK(write(pipes[0][1], &handle, sizeof handle) == sizeof handle);
  char answer = 0;
  CHECK(read(pipes[1][0], &answer, 1) == 1);
  done(driver().memcpy_async(address_of(&number), address + 8, sizeof number, nullptr));
  done(driver().mem_free(address));
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  std::printf("%u after the other added 3\n", number);
}

struct AtTheEnd {
  ~AtTheEnd() {
    int count = 0;
    std::printf("at the end: %d\n", driver().device_get_count(&count));
  }
};

void ends() {
  static AtTheEnd object;
  driver();
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, void (*)()> parts = {
      {"all", all},
      {"loads", loads},
      {"loads_twice", loads_twice},
      {"forks", forks},
      {"creates", creates},
      {"tries", tries},
      {"host_touches", host_touches},
      {"kernel_touches", kernel_touches},
      {"forgets_to_wait", forgets_to_wait},
      {"shares", shares},
      {"ends", ends},
  };
  try {
    parts.at(argc > 1 ? argv[1] : "all")();
  } catch (const Error& error) {
    std::printf("error: %s\n", error.what());
    return 3;
  }
}

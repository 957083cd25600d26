#include "memory/device_stream.hpp"

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "memory/region.hpp"
#include "sys/error.hpp"
#include "sys/process.hpp"

namespace pgasdl {
namespace {

using cuda::check;

// The error may be an earlier call's, which is reported once: then the second call waits. Failed
// work of the device repeats its error.
cuda::Result synchronize(cuda::Stream stream) {
  const auto& driver = cuda::driver();
  const cuda::Result result = driver.stream_synchronize(stream);
  if (result != cuda::kSuccess) (void)driver.stream_synchronize(stream);
  return result;
}

cuda::Stream make_stream(cuda::Device device) {
  const cuda::Current current(device);
  const auto& driver = cuda::driver();
  int least = 0;
  int greatest = 0;
  check(driver.ctx_get_stream_priority_range(&least, &greatest), "asking for priorities");
  cuda::Stream stream = nullptr;
  check(driver.stream_create(&stream, cuda::kStreamNonBlocking, greatest),
        text("making a stream on GPU ", device));
  return stream;
}

std::mutex streams_mutex;
// Never destroyed: at process exit the driver may already be gone.
std::map<cuda::Device, std::vector<cuda::Stream>>& idle_streams() {
  static auto* const idle = new std::map<cuda::Device, std::vector<cuda::Stream>>;
  return *idle;
}

}  // namespace

bool is_capturing(const StreamOrder& order) {
  const cuda::Current current(order.device);
  int capturing = 0;
  check(cuda::driver().stream_is_capturing(order.stream, &capturing), "asking for a capture");
  return capturing != 0;
}

void refuse_capture(const StreamOrder& order, const char* what) {
  if (is_capturing(order)) {
    throw Error(ErrorKind::kUnavailable,
                text(what, " cannot be captured into a CUDA graph, as the host has a part in it: ",
                     "call it outside of the capture"));
  }
}

cuda::Stream shared_stream(cuda::Device device, std::size_t number) {
  static std::map<cuda::Device, std::array<cuda::Stream, kSharedStreams>> streams;
  static std::mutex mutex;  // separate: the driver may hold up the creation of streams
  const std::lock_guard lock(mutex);
  auto& of_device = streams[device];
  if (of_device[0] == nullptr) {
    std::array<cuda::Stream, kSharedStreams> made{};
    for (cuda::Stream& stream : made) stream = make_stream(device);
    of_device = made;
  }
  return of_device[number % kSharedStreams];
}

cuda::DevicePtr device_address(const void* word) {
  cuda::DevicePtr address = 0;
  check(cuda::driver().mem_host_get_device_pointer(&address, const_cast<void*>(word), 0),
        "a word of the host for the GPU");
  return address;
}

bool streams_wait(cuda::Device device) {
  static std::mutex mutex;
  static std::map<cuda::Device, bool> known;
  // Never unmapped.
  static const auto* const page = [device] {
    auto* const made = new std::shared_ptr<Region>(Region::create_private(page_bytes()));
    (*made)->pin(device);
    return made;
  }();
  const std::lock_guard lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  const auto& driver = cuda::driver();
  const cuda::Stream stream = shared_stream(device, 0);
  const cuda::Current current(device);
  const cuda::DevicePtr word = device_address((*page)->data());
  return known[device] =
             driver.stream_wait_value(stream, word, 0, cuda::kWaitValueEq) == cuda::kSuccess &&
             driver.stream_write_value(stream, word, 0, cuda::kWriteValueDefault) == cuda::kSuccess;
}

DeviceStream::DeviceStream(cuda::Device device) : device_(device), born_(fork_depth()) {
  {
    const std::lock_guard lock(streams_mutex);
    auto& idle = idle_streams()[device];
    if (!idle.empty()) {
      stream_ = idle.back();
      idle.pop_back();
      return;
    }
    idle.reserve(idle.capacity() + 1);  // so that returning the stream allocates nothing
  }
  stream_ = make_stream(device);
}

DeviceStream::~DeviceStream() {
  if (fork_depth() != born_) return;  // the parent owns the stream, and the lock
  const std::lock_guard lock(streams_mutex);
  idle_streams()[device_].push_back(stream_);
}

void DeviceStream::wait() const noexcept {
  try {
    const cuda::Current current(device_);
    (void)synchronize(stream_);
  } catch (const Error&) {
    // A forked child: no work is under way here.
  }
}

DeviceMoment::DeviceMoment(cuda::Device device) : device_(device) {
  const cuda::Current current(device);
  check(cuda::driver().event_create(&event_, cuda::kEventDisableTiming), "making an event");
}

std::unique_ptr<DeviceMoment> DeviceMoment::of(const StreamOrder& order) {
  auto moment = std::make_unique<DeviceMoment>(order.device);
  moment->mark(order.stream);
  return moment;
}

DeviceMoment::~DeviceMoment() {
  try {
    const cuda::Current current(device_);
    (void)cuda::driver().event_destroy(event_);
  } catch (const Error&) {
    // A forked child: the parent owns the event.
  }
}

void DeviceMoment::mark(cuda::Stream stream) {
  const cuda::Current current(device_);
  check(cuda::driver().event_record(event_, stream), "recording an event");
}

void DeviceMoment::hold(cuda::Stream stream) const {
  const cuda::Current current(device_);
  check(cuda::driver().stream_wait_event(stream, event_, 0), "letting a stream wait");
}

bool DeviceMoment::reached() const {
  const cuda::Current current(device_);
  const cuda::Result result = cuda::driver().event_query(event_);
  if (result == cuda::kNotReady) return false;
  check(result, text("work on GPU ", device_));
  return true;
}

bool DeviceMoment::over() const noexcept {
  // A second attempt: failed work of the device repeats its error, another call's error does not.
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      return reached();
    } catch (const Error&) {
      continue;
    }
  }
  return true;
}

void DeviceMoment::wait() const noexcept {
  try {
    const cuda::Current current(device_);
    // As in synchronize().
    if (cuda::driver().event_synchronize(event_) != cuda::kSuccess) {
      (void)cuda::driver().event_synchronize(event_);
    }
  } catch (const Error&) {
    // A forked child: no work is under way here.
  }
}

void device_copy(const StreamOrder& order, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const std::string what = text("copying ", bytes, " bytes on GPU ", order.device);
  const cuda::Current current(order.device);
  check(cuda::driver().memcpy_async(reinterpret_cast<cuda::DevicePtr>(to),
                                    reinterpret_cast<cuda::DevicePtr>(from), bytes, order.stream),
        what);
  check(synchronize(order.stream), what);
}

void device_copy(cuda::Device device, void* to, const void* from, std::size_t bytes) {
  const DeviceStream stream(device);
  device_copy({device, stream.get()}, to, from, bytes);
}

void device_clear(cuda::Device device, std::byte* data, std::size_t bytes) {
  const DeviceStream stream(device);
  const cuda::Current current(device);
  check(
      cuda::driver().memset_async(reinterpret_cast<cuda::DevicePtr>(data), 0, bytes, stream.get()),
      "clearing GPU memory");
  check(synchronize(stream.get()), "clearing GPU memory");
}

}  // namespace pgasdl

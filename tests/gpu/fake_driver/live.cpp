// Tests' questions to the fake driver: what the program has not released yet, as JSON, and where
// the memory behind an address lies, to look at memory that only a GPU may touch.
#include <cstdio>
#include <mutex>

#include "memory.hpp"
#include "streams.hpp"

namespace fake_cuda {
std::size_t n_modules();
}

extern "C" __attribute__((visibility("default"))) const char* fakeLive() {
  using namespace fake_cuda;
  static thread_local char text[512];
  const std::shared_lock lock(memory().mutex);
  std::snprintf(text, sizeof text,
                "{\"allocations\": %zu, \"handles\": %zu, \"reservations\": %zu, "
                "\"mappings\": %zu, \"registrations\": %zu, \"streams\": %zu, \"events\": %zu, "
                "\"modules\": %zu}",
                n_allocations(), n_handles(), memory().n_reserved(), memory().n_mapped(),
                memory().n_registered(), n_streams(), n_events(), n_modules());
  return text;
}

extern "C" __attribute__((visibility("default"))) void* fakeHostAddress(
    pgasdl::cuda::DevicePtr address) {
  using namespace fake_cuda;
  const std::shared_lock lock(memory().mutex);
  pgasdl::cuda::DevicePtr first = 0;
  const Mapping* mapping = memory().find(address, &first);
  if (mapping == nullptr) return nullptr;
  return memory().resolve(address, 1, mapping->allocation->device, Use::kCopy);
}

#pragma once

// Tools for tests of the verbs transport: a check for a device, and timed steps.

#include <cstdio>

#include "check.hpp"
#include "sys/clock.hpp"
#include "transport/verbs/verbs.hpp"

namespace pgasdl::testing {

inline constexpr const char* kToken = "sixteen bytes...";

// Prints the devices; returns false and prints the reason if tests have to be skipped.
inline bool have_device() {
  try {
    const auto devices = verbs_devices();
    for (const VerbsDeviceInfo& info : devices) {
      std::printf("%s port %d GID %d %s %s %s: %s\n", info.device.c_str(), info.port,
                  info.gid_index, info.gid.c_str(), info.type.c_str(), info.net_device.c_str(),
                  info.chosen ? "chosen" : info.refused.c_str());
    }
    if (!devices.empty() && devices[0].chosen) return true;
    std::puts("no RDMA device: skipped");
  } catch (const Error& error) {
    CHECK_NOTE(error.kind() == ErrorKind::kUnavailable, "%s", error.what());
    std::printf("no RDMA device: skipped (%s)\n", error.what());
  }
  return false;
}

template <typename Test>
void step(const char* name, Test&& test) {
  const auto start = Clock::now();
  test();
  std::printf("%-16s %6.2f s\n", name, std::chrono::duration<double>(Clock::now() - start).count());
  std::fflush(stdout);
}

inline VerbsOptions depth(std::uint32_t requests) {
  VerbsOptions options;
  options.depth = requests;
  return options;
}

// Makes an adapter store flags that come without data or find no receive.
inline VerbsOptions as_messages(VerbsOptions options = {}) {
  options.count_flags = false;
  return options;
}

}  // namespace pgasdl::testing

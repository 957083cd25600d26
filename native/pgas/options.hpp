// The options of a context, which init() sets once.
#pragma once

#include <cstdint>

namespace pgasdl {

struct Options {
  double timeout = 60;                  // seconds, for every call that names none
  std::uint32_t queue_depth = 1024;     // requests between two wait()s
  std::uint32_t queues = 16;            // the most that a program may have
  std::uint64_t passive_bytes = 65536;  // longest passive message
  double spin_us = 20;                  // a wait spins, then yields, then sleeps
  double yield_us = 1000;
  std::uint32_t heartbeat_ms = 200;
  double stopped_after = 3;   // seconds without a heartbeat
  bool survivable = true;     // the launcher lets ranks go on after a loss
  bool reach_devices = true;  // peers reach a GPU's memory, where their transport can
};

// With fewer heartbeats than this within `stopped_after`, a look that came late could not be told
// from a peer that stopped.
constexpr double kLeastHeartbeats = 3;

constexpr std::uint32_t kMaxListElements = 1u << 16;
constexpr std::uint64_t kMaxNotifications = 1u << 28;  // per segment: 1 GiB of board

}  // namespace pgasdl

// The options that init() decides once for a context.
#pragma once

#include <cstdint>

namespace pgasdl {

struct Options {
  double timeout = 60;                  // seconds, of every call that names none
  std::uint32_t queue_depth = 1024;     // requests between two wait()s
  std::uint32_t queues = 16;            // at most, user's
  std::uint64_t passive_bytes = 65536;  // longest passive message
  double spin_us = 20;                  // a wait spins, then yields, then sleeps
  double yield_us = 1000;
  std::uint32_t heartbeat_ms = 200;
  double stopped_after = 3;   // seconds without a heartbeat
  bool reach_devices = true;  // peers reach a GPU's memory, where their transport can
};

// Fewer heartbeats than these within `stopped_after`, and a rank that was stopped cannot be told
// from one that this rank did not look at in time.
constexpr double kLeastHeartbeats = 3;

constexpr std::uint32_t kMaxListElements = 1u << 16;
constexpr std::uint64_t kMaxNotifications = 1u << 28;  // per segment: 1 GiB of board

}  // namespace pgasdl

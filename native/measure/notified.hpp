// The core's own notified writes, without Python: the cost of its path above the floor.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "pgas/context.hpp"

namespace pgasdl {

// write_notify, notify_waitsome and notify_reset between ranks 0 and 1, one way, in nanoseconds:
// one number per batch of `rounds` round trips. Collective over both; others get an empty result at
// once. `segment` holds a source at 0 and a target at `target`, and notification 0 is unused.
std::vector<double> notified_writes(Context& context, const std::shared_ptr<Segment>& segment,
                                    std::uint64_t bytes, std::uint64_t target,
                                    std::uint32_t batches, std::uint32_t rounds);

// The same bytes over a connected socket, without anything of ours but the waiting. Called on its
// two ends, on ranks 0 and 1.
std::vector<double> socket_pings(Context& context, int socket, std::uint64_t bytes,
                                 std::uint32_t batches, std::uint32_t rounds);

// Rank 0 writes `count` messages to rank 1 and waits for the queue; nanoseconds per message.
double streamed_writes(Context& context, const std::shared_ptr<Segment>& segment,
                       std::uint64_t bytes, std::uint64_t target, std::uint32_t count);

}  // namespace pgasdl

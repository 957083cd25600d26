#include "measure/notified.hpp"

#include <sys/socket.h>

#include <cerrno>
#include <functional>

namespace pgasdl {
namespace {

// Round trips that rank 0 begins; nanoseconds one way, one number per batch.
std::vector<double> round_trips(Context& context, std::uint32_t batches, std::uint32_t rounds,
                                const std::function<void(Deadline)>& send,
                                const std::function<void(Deadline)>& receive) {
  constexpr std::uint32_t kBatchesPerDeadline = 100;
  // One deadline serves several batches, which take far less time: the measurement would include
  // reading the clock in every call.
  Deadline deadline = Deadline::once();
  // By ticks, which cost less than a clock that is a slow system call.
  std::vector<std::uint64_t> spent;
  const auto start = Clock::now();
  const std::uint64_t start_ticks = ticks();
  for (std::uint32_t batch = 0; batch < batches; ++batch) {
    if (batch % kBatchesPerDeadline == 0) deadline = Deadline::in(context.options().timeout);
    const std::uint64_t began = ticks();
    for (std::uint32_t round = 0; round < rounds; ++round) {
      if (context.rank() == 0) send(deadline);
      receive(deadline);
      if (context.rank() != 0) send(deadline);
    }
    spent.push_back(ticks() - began);
  }
  const std::chrono::duration<double, std::nano> elapsed = Clock::now() - start;
  const double ns = elapsed.count() / static_cast<double>(ticks() - start_ticks);
  std::vector<double> one_way;
  for (const std::uint64_t batch : spent) {
    one_way.push_back(static_cast<double>(batch) * ns / (2.0 * rounds));
  }
  return one_way;
}

}  // namespace

std::vector<double> notified_writes(Context& context, const std::shared_ptr<Segment>& segment,
                                    std::uint64_t bytes, std::uint64_t target,
                                    std::uint32_t batches, std::uint32_t rounds) {
  if (context.size() < 2 || context.rank() > 1) return {};
  const Rank peer = 1 - context.rank();
  const Slice from{segment, 0, bytes};
  const Slice to{segment, target, bytes};
  const Pair pair{&from, &to};
  const auto send = [&](Deadline deadline) {
    if (context.write_notify({&pair, 1}, peer, *segment, 0, 1, 0, deadline) != Outcome::kDone) {
      throw Error(ErrorKind::kQueue, "measuring: queue 0 stays full");
    }
  };
  const auto receive = [&](Deadline deadline) {
    std::uint32_t found = 0;
    if (context.notify_waitsome(*segment, 0, 1, deadline, found) != Outcome::kDone) {
      throw Error(ErrorKind::kPeerLost, text("measuring: no notification from rank ", peer), peer);
    }
    context.notify_reset(*segment, 0);
  };
  return round_trips(context, batches, rounds, send, receive);
}

std::vector<double> socket_pings(Context& context, int socket, std::uint64_t bytes,
                                 std::uint32_t batches, std::uint32_t rounds) {
  std::vector<std::byte> here(bytes), there(bytes);
  const auto move = [&](auto&& call, std::byte* memory, Deadline deadline) {
    std::uint64_t moved = 0;
    const auto ready = [&] {
      while (moved < bytes) {
        const ssize_t n = call(socket, memory + moved, bytes - moved, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
        if (n <= 0) throw Error(ErrorKind::kPeerLost, "measuring: the socket's other end is gone");
        moved += static_cast<std::uint64_t>(n);
      }
      return true;
    };
    if (context.waiter().until(ready, deadline, WaitCause::kUncounted, "a socket") !=
        Outcome::kDone) {
      throw Error(ErrorKind::kPeerLost, "measuring: the socket's other end is silent");
    }
  };
  return round_trips(
      context, batches, rounds, [&](Deadline deadline) { move(::send, here.data(), deadline); },
      [&](Deadline deadline) { move(::recv, there.data(), deadline); });
}

double streamed_writes(Context& context, const std::shared_ptr<Segment>& segment,
                       std::uint64_t bytes, std::uint64_t target, std::uint32_t count) {
  const Slice from{segment, 0, bytes};
  const Slice to{segment, target, bytes};
  const Pair pair{&from, &to};
  const Deadline deadline = Deadline::in(context.options().timeout);
  const auto began = Clock::now();
  for (std::uint32_t message = 0; message < count; ++message) {
    if (context.write({&pair, 1}, 1, 0, deadline) != Outcome::kDone) {
      throw Error(ErrorKind::kQueue, "measuring: queue 0 stays full");
    }
  }
  if (context.wait(0, deadline) != Outcome::kDone) {
    throw Error(ErrorKind::kPeerLost, "measuring: rank 1 takes no writes", 1);
  }
  const std::chrono::duration<double, std::nano> spent = Clock::now() - began;
  return spent.count() / count;
}

}  // namespace pgasdl

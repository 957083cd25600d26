// RDMA: endpoints, segment descriptions, and the datagrams by which connections are agreed on, in
// any order and mixed with what the rank itself does.
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "adapter.hpp"
#include "fuzz.hpp"
#include "rank_over_verbs.hpp"
#include "transport/siphash.hpp"
#include "transport/verbs/memory.hpp"

namespace pgasdl::fuzz {
namespace {

constexpr int kMostSteps = 64;

// As a rank of the job would have sent it: nothing else is looked at.
std::string sealed(std::string datagram) {
  std::uint64_t tag = 0;
  constexpr std::size_t kTagAt = sizeof(std::uint64_t);  // after the magic
  if (datagram.size() < kTagAt + sizeof tag) return datagram;
  std::memcpy(&datagram[kTagAt], &tag, sizeof tag);
  tag = siphash(kToken, datagram);
  std::memcpy(&datagram[kTagAt], &tag, sizeof tag);
  return datagram;
}

// Rank 1's first messages to rank 0.
struct Genuine {
  explicit Genuine(const VerbsDevice& device) {
    RankOverVerbs other(device, 1, kToken);
    endpoint = other.manager.endpoint();
    other.manager.connect(0, endpoint);
    other.manager.want(0, 0);
    datagram = adapter().sent;
  }
  std::string endpoint;
  std::string datagram;
};

// Takes a peer's description of its flags, and an immediate: none is raised but on boards of ours.
void raise_flag(Input& input) {
  const auto number = [&] {
    return std::uint32_t{input.byte()} | std::uint32_t{input.byte()} << 24;
  };
  std::array<FlagWord, 6> words{};
  VerbsBoards boards;
  boards.add(&words[1], words.size() - 2);
  VerbsFlags::Shared shared{};
  shared.slots[input.byte()] = {number(), number(), number(), number()};
  VerbsFlags::raise(number(), shared, boards);
  REQUIRE(words.front() == 0 && words.back() == 0);
}

void run(Input& input) {
  static const VerbsDevice device{VerbsOptions{}};
  static const Genuine genuine(device);
  adapter().arriving.clear();
  RankOverVerbs rank(device, 0, kToken);
  VerbsConnectionManager& manager = rank.manager;
  for (int step = 0; step < kMostSteps && !input.empty(); ++step) {
    const std::uint8_t what = input.byte();
    const Rank peer = 1 + (what >> 4) % 2;
    const QueueId queue = (what >> 5) % RankOverVerbs::kQueues;
    switch (what % 9) {
      case 0:
        accepted([&] { manager.connect(peer, input.words(genuine.endpoint)); });
        break;
      case 1:
      case 2:
        adapter().arriving = sealed(input.words(genuine.datagram));
        manager.progress();
        break;
      case 3:  // its own datagram comes back
        adapter().arriving = sealed(input.words(adapter().sent));
        manager.service();
        break;
      case 4:
        accepted([&] { manager.want(queue, peer); });
        break;
      case 5:
        accepted([&] { manager.reconnect(peer); });
        break;
      case 6:
        accepted([&] {
          const std::string description(40, '\1');
          (void)VerbsMemory::attach(peer, input.words(description));
        });
        break;
      case 7:
        manager.connect(peer, genuine.endpoint);
        break;
      default:
        raise_flag(input);
    }
    constexpr int kMostConnections = RankOverVerbs::kQueues * (RankOverVerbs::kSize - 1);
    REQUIRE(adapter().n_pairs <= 1 + kMostConnections);
  }
  manager.leave();
}

}  // namespace
}  // namespace pgasdl::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  pgasdl::fuzz::Input input(data, size);
  pgasdl::fuzz::run(input);
  return 0;
}

// News of who is alive, which ranks on other machines write into this rank's memory.
#include "fuzz.hpp"
#include "pgas/gossip.hpp"
#include "transport/loopback/loopback.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace pgasdl;
  constexpr Rank kSize = 4;
  static const auto world = std::make_shared<LoopbackWorld>(kSize);
  static LoopbackTransport transport(world, 0);
  static Segment control(1, Gossip::bytes(kSize), 1, nullptr, kSize);
  static const Gossip gossip(transport, 0, 0, kSize, control, 0, {1, 2, 3});
  fuzz::Input input(data, size);
  const std::string announced = input.bytes(Gossip::bytes(kSize));
  std::memset(control.local().data, 0, Gossip::bytes(kSize));
  std::memcpy(control.local().data, announced.data(), announced.size());
  for (const Rank peer : gossip.ranks()) {
    (void)gossip.beat(peer);
    const Gossip::Words words = gossip.words(peer);
    REQUIRE(words.own <= Health::kClosed);
    REQUIRE(words.cause.rank >= -1 && words.cause.rank < kSize);
    REQUIRE(words.cause.how <= Health::kClosed);
  }
  for (std::size_t neighbour = 0; neighbour < gossip.neighbours().size(); ++neighbour) {
    for (Rank of = 0; of < kSize; ++of) {
      const Health health = gossip.announced(neighbour, of);
      REQUIRE(health <= Health::kClosed);
      REQUIRE(!name(health).empty());
    }
  }
  return 0;
}

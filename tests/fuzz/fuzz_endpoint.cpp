// A rank's description of itself at init, around its transport's endpoint, and how descriptions of
// several transports are told apart.
#include "fuzz.hpp"
#include "pgas/context.hpp"
#include "transport/loopback/loopback.hpp"
#include "transport/router.hpp"

namespace pgasdl::fuzz {
namespace {

std::unique_ptr<Transport> routed(const std::shared_ptr<LoopbackWorld>& world, Rank rank) {
  std::vector<std::unique_ptr<Transport>> transports;
  transports.push_back(std::make_unique<LoopbackTransport>(world, rank));
  transports.push_back(std::make_unique<LoopbackTransport>(world, rank));
  return std::make_unique<Router>(std::move(transports), std::vector<std::size_t>{0, 1});
}

}  // namespace
}  // namespace pgasdl::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace pgasdl;
  static const auto world = std::make_shared<LoopbackWorld>(2);
  static Context context(0, 2, fuzz::routed(world, 0), {});
  static const auto peer = fuzz::routed(world, 1);
  static const std::string genuine = context.endpoint();
  fuzz::Input input(data, size);
  if (input.byte() % 2 == 0) {
    fuzz::accepted([&] { context.connect({genuine, input.words(genuine)}); });
    return 0;
  }
  Segment segment(7, 64, 1, nullptr, 2);
  constexpr Rank kPeers[] = {0, 1};
  const std::string description = peer->publish(segment.local(), kPeers);
  fuzz::accepted([&] {
    const RemoteSegment remote =
        context.transport().attach(1, input.words(description), kHost, Deadline::in(0));
    REQUIRE(remote.bytes == segment.bytes());
  });
  return 0;
}

// Shared memory: endpoints, segment descriptions, and the datagrams that carry descriptors.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <optional>

#include "fuzz.hpp"
#include "memory/region.hpp"
#include "transport/shm/shm.hpp"

namespace pgasdl::fuzz {
namespace {

constexpr std::uint64_t kBytes = 4096;
constexpr std::uint32_t kNotifications = 64;
constexpr std::size_t kAddressAt = sizeof(std::int32_t);  // in an endpoint, after the process id

// Two ranks, of which the second has one segment.
struct Pair {
  Pair() : here(0, 2, kToken), there(1, 2, kToken) {
    there.connect(0, here.endpoint());
    segment.id = 7;
    segment.bytes = kBytes;
    segment.notifications = kNotifications;
    segment.region = Region::create(kBytes + kNotifications * sizeof(FlagWord), segment.descriptor);
    segment.data = segment.region->data();
    segment.board = reinterpret_cast<FlagWord*>(segment.data + kBytes);
  }
  ShmTransport here;
  ShmTransport there;
  LocalSegment segment;
};

void require_inside(const RemoteSegment& remote) {
  const auto& region = *static_cast<const Region*>(remote.keep.get());
  const auto* board = reinterpret_cast<const std::byte*>(remote.board);
  REQUIRE(reinterpret_cast<std::uintptr_t>(board) % alignof(FlagWord) == 0);
  REQUIRE(board >= region.data());
  REQUIRE(board + std::uint64_t{remote.notifications} * sizeof(FlagWord) <=
          region.data() + region.bytes());
  if (remote.data == nullptr) return;
  REQUIRE(remote.data == region.data());
  REQUIRE(remote.bytes <= region.bytes());
  REQUIRE(remote.data + remote.bytes <= board);
}

void attach(Pair& ranks, Input& input) {
  constexpr Rank kPeers[] = {0, 1};
  const std::string genuine = ranks.there.publish(ranks.segment, kPeers);
  accepted(
      [&] { require_inside(ranks.here.attach(1, input.words(genuine), kHost, Deadline::in(0))); });
  ranks.here.service();  // drops what came for a refused description
}

// A datagram of a stranger who is the same user, with or without descriptors.
void receive(Pair& ranks, Input& input) {
  const UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  REQUIRE(socket);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = ranks.here.endpoint().substr(kAddressAt).c_str();
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const int descriptors[] = {socket.get(), socket.get()};
  const std::size_t n_descriptors = input.byte() % 3;
  std::string offer(kToken);
  offer.append(8, 1);
  std::string words = input.words(offer);
  iovec content{words.data(), words.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof descriptors)] = {};
  msghdr message{};
  message.msg_name = &address;
  message.msg_namelen = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  if (n_descriptors != 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(n_descriptors * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(n_descriptors * sizeof(int));
    std::memcpy(CMSG_DATA(header), descriptors, n_descriptors * sizeof(int));
  }
  REQUIRE(sendmsg(socket.get(), &message, MSG_NOSIGNAL) >= 0);
  ranks.here.service();
}

}  // namespace
}  // namespace pgasdl::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace pgasdl::fuzz;
  static std::optional<Pair> ranks;
  if (!ranks) ranks.emplace();
  Input input(data, size);
  switch (input.byte() % 3) {
    case 0:
      accepted([&] { ranks->here.connect(1, input.words(ranks->there.endpoint())); });
      break;
    case 1:
      attach(*ranks, input);
      break;
    default:
      receive(*ranks, input);
      ranks.reset();  // else what it keeps would reach the next execution
  }
  return 0;
}

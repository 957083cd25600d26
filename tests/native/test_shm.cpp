// A segment over shared memory goes to its peer only.

#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>

#include "check.hpp"
#include "transport/shm/shm.hpp"

namespace {

using namespace pgasdl;

constexpr const char* kToken = "sixteen bytes...";
constexpr std::uint64_t kBytes = 4096;
constexpr std::array<Rank, 2> kBoth = {0, 1};

LocalSegment segment(SegmentId id) {
  LocalSegment made;
  made.id = id;
  made.bytes = kBytes - sizeof(FlagWord);
  made.notifications = 1;
  made.region = Region::create(kBytes, made.descriptor);
  made.data = made.region->data();
  made.board = reinterpret_cast<FlagWord*>(made.data + made.bytes);
  return made;
}

// A rank is gone, and a stranger has taken the name of its mailbox, which anyone can read: the
// stranger gets neither memory nor the token.
void strangers_in_a_place_that_is_free() {
  ShmTransport here(0, 2, kToken), there(1, 2, kToken);
  here.connect(1, there.endpoint());
  there.connect(0, here.endpoint());
  LocalSegment first = segment(1);
  const std::string description = here.publish(first, kBoth);
  CHECK(there.attach(0, description, kHost, Deadline::in(30)).data != nullptr);

  const int mailbox = there.service_descriptor();
  sockaddr_un name{};
  socklen_t bytes = sizeof name;
  CHECK(getsockname(mailbox, reinterpret_cast<sockaddr*>(&name), &bytes) == 0);
  there.end_service();
  const UniqueFd stranger(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  CHECK(bind(stranger.get(), reinterpret_cast<sockaddr*>(&name), bytes) == 0);

  LocalSegment second = segment(2);
  (void)here.publish(second, kBoth);
  here.retract(second);
  (void)here.publish(second, kBoth);
  char got = 0;
  CHECK(recv(stranger.get(), &got, sizeof got, MSG_DONTWAIT) < 0 && errno == EAGAIN);
}

}  // namespace

int main() { strangers_in_a_place_that_is_free(); }

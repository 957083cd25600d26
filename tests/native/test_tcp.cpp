// Transport tcp, over this machine's own addresses.

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "check.hpp"
#include "transport/tcp/tcp.hpp"
#include "unmapped.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

Settings over_tcp() {
  Settings settings;
  TcpOptions tcp;
  tcp.queues = settings.options.queues + Context::kOwnQueues;
  settings.transport = [tcp](Rank rank, Rank size) {
    return std::make_unique<TcpTransport>(rank, size, "sixteen bytes...", tcp);
  };
  return settings;
}

// An ended connection stays until the context goes: not with room for what arrives.
static_assert(sizeof(TcpRequests) < 1024 && sizeof(TcpAnswers) < 1024);

// A listener whose guest gets no descriptor is left alone for a while, and takes the guest then.
void no_descriptor_is_free() {
  const std::string token = "sixteen bytes...";
  TcpOptions options;
  TcpMeeting host(1, 2, token, options), guest(0, 2, token, options);
  const std::vector<sockaddr_in6> addresses =
      tcp_addresses(1, tcp_endpoint(host.listener(), options));
  int hosted = 0, made = 0;
  const auto advance = [](TcpMeeting& meeting, int& n) {
    meeting.advance(
        [&](TcpMeeting::Established) { ++n; },
        [](Rank, QueueId, const std::string& why) { CHECK_NOTE(false, "%s", why.c_str()); });
  };
  const auto readable = [&] {
    pollfd watched{host.descriptor(), POLLIN, 0};
    return poll(&watched, 1, 0) == 1;
  };
  guest.connect(1, 0, addresses);
  while (!readable()) advance(guest, made);
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(dup(0));  // the lowest that is free
  close(static_cast<int>(none.rlim_cur));
  setrlimit(RLIMIT_NOFILE, &none);
  advance(host, hosted);
  CHECK(!readable());
  CHECK(host.next() != Clock::time_point::max());
  setrlimit(RLIMIT_NOFILE, &before);
  while (hosted == 0 || made == 0) {
    advance(host, hosted);
    advance(guest, made);
  }
}

// A peer that asks more than the deepest queue holds, and takes no answers, loses its connection.
void no_answers_are_taken() {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
  const UniqueFd events(epoll_create1(EPOLL_CLOEXEC)), peer(ends[1]);
  const auto memories = std::make_shared<TcpMemories>();
  const std::atomic<WakeWord*> nobody{nullptr};
  TcpAnswers answers(TcpSocket(ends[0]), events.get(), 1, 0, *memories, nobody);
  answers.begin_events();
  const std::vector<TcpFrame> reads(1024, TcpFrame{.kind = TcpFrame::Kind::kRead});
  const std::size_t all = reads.size() * sizeof(TcpFrame);
  std::size_t n_sent = 0;  // bytes
  while (!answers.ended()) {
    const std::size_t at = n_sent % all;
    const auto* from = reinterpret_cast<const std::byte*>(reads.data()) + at;
    const ssize_t sent = send(peer.get(), from, all - at, MSG_NOSIGNAL);
    if (sent > 0) n_sent += static_cast<std::size_t>(sent);
    answers.receive();
  }
  CHECK(n_sent / sizeof(TcpFrame) >= 1 << 20);
}

// Sources may change once the kernel has their bytes, long before the peer acknowledges them.
void sources_have_left() {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
  const UniqueFd events(epoll_create1(EPOLL_CLOEXEC)), peer(ends[1]);
  TcpQueue queue;
  const TcpRequests::Listener nobody{[] {}, [](TcpRequests&) {}, [] {}};
  TcpRequests requests(TcpSocket(ends[0]), events.get(), 1, queue, 1, nobody);
  requests.begin_events();
  CHECK(requests.sent());
  std::vector<std::byte> source(4 << 20, std::byte{7}), taken;
  LocalSegment local;
  local.data = source.data();
  RemoteSegment remote;
  remote.keep = std::make_shared<std::uint32_t>(3);
  const Transfer transfer{&local, 0, &remote, 0, source.size()};
  CHECK(requests.write({&transfer, 1}, nullptr));
  CHECK(!requests.sent());
  while (!requests.sent()) {
    std::byte some[1 << 16];
    const ssize_t got = recv(peer.get(), some, sizeof some, 0);
    if (got > 0) taken.insert(taken.end(), some, some + got);
  }
  std::ranges::fill(source, std::byte{8});
  for (std::byte some[1 << 16];;) {
    const ssize_t got = recv(peer.get(), some, sizeof some, 0);
    if (got <= 0) break;
    taken.insert(taken.end(), some, some + got);
  }
  const auto first = taken.begin() + sizeof(TcpFrame);
  CHECK(std::count(first, first + static_cast<std::ptrdiff_t>(source.size()), std::byte{7}) ==
        static_cast<std::ptrdiff_t>(source.size()));
  CHECK(!queue.complete());
  requests.drop("the test ends", false);
}

}  // namespace

int main() {
  no_descriptor_is_free();
  no_answers_are_taken();
  sources_have_left();
  flag_is_last(over_tcp(), 3, 512, 40);
  flag_is_last(over_tcp(), 2, 20000, 10);
  lists_and_reads(over_tcp(), 40);
  lists_and_reads(over_tcp(), 500);
  many_in_flight(over_tcp(), 3000);
  away(over_tcp());
  beats_are_lost(over_tcp(), 60);
  plans(over_tcp(), 3, false);
  plans(over_tcp(), 2, true);
  relayed(over_tcp());
  std::puts("ok");
}

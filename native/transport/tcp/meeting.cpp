#include "transport/tcp/meeting.hpp"

#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "sys/error.hpp"
#include "sys/packed.hpp"
#include "transport/siphash.hpp"

namespace pgasdl {
namespace {

constexpr auto kPause = std::chrono::milliseconds(20);
constexpr auto kPerAddress = std::chrono::seconds(1);
constexpr auto kPerStranger = std::chrono::seconds(5);
constexpr std::size_t kMostStrangers = 256;  // at once: beyond, the oldest goes
constexpr int kPerCall = 64;

TcpNonce fresh() {
  TcpNonce nonce;
  std::size_t have = 0;
  while (have < nonce.size()) {
    const ssize_t got = getrandom(nonce.data() + have, nonce.size() - have, 0);
    if (got < 0 && errno != EINTR) throw_system("getrandom", errno);
    if (got > 0) have += static_cast<std::size_t>(got);
  }
  return nonce;
}

}  // namespace

TcpMeeting::TcpMeeting(Rank rank, Rank size, std::string token, const TcpOptions& options)
    : rank_(rank),
      size_(size),
      token_(std::move(token)),
      options_(options),
      events_(epoll_create1(EPOLL_CLOEXEC)),
      listener_(tcp_listen(options)) {
  if (!events_) throw_system("epoll_create1", errno);
  epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
  if (epoll_ctl(events_.get(), EPOLL_CTL_ADD, listener_.get(), &event) != 0) {
    throw_system("epoll_ctl", errno);
  }
}

// `end` names who proves: a code that one end made is of no use to the other.
std::uint64_t TcpMeeting::code(char end, const Guest& guest) const {
  return siphash(token_, std::string(1, end) + packed(guest.greeting) + packed(guest.reply.nonce));
}

void TcpMeeting::connect(Rank peer, QueueId queue, std::span<const sockaddr_in6> addresses) {
  Guest guest{Step::kPause, true, peer, queue};
  guest.addresses = addresses;
  guest.give_up =
      Clock::now() + addresses.size() * kPerAddress +
      std::chrono::duration_cast<Nanoseconds>(std::chrono::duration<double>(options_.timeout_s));
  guest.greeting.size = size_;
  guest.greeting.from = rank_;
  guest.greeting.to = peer;
  guest.greeting.queue = queue;
  guest.why = "it gave no address";
  guests_.push_back(std::move(guest));  // its step is due at once
}

Clock::time_point TcpMeeting::next() const {
  auto next = listens_again_;
  for (const Guest& guest : guests_) next = std::min(next, guest.until);
  return next;
}

void TcpMeeting::advance(const std::function<void(Established)>& established,
                         const std::function<void(Rank, QueueId, std::string)>& failed) {
  std::array<epoll_event, kPerCall> events;
  const int n = epoll_wait(events_.get(), events.data(), kPerCall, 0);
  for (int i = 0; i < n; ++i) {
    auto* guest = static_cast<Guest*>(events[static_cast<std::size_t>(i)].data.ptr);
    if (guest == nullptr) {
      accept();
    } else if (guest->step != Step::kOver) {
      step(*guest, established);
    }
  }
  if (next() == Clock::time_point::max()) return;
  const auto now = Clock::now();
  if (listens_again_ <= now) listen_again(Clock::time_point::max());
  for (Guest& guest : guests_) {
    if (guest.step == Step::kOver || guest.until > now) continue;
    if (!guest.mine) {
      if (n == kPerCall) continue;  // its proof may be here and not taken yet
      guest.step = Step::kOver;
    } else if (guest.give_up <= now) {
      guest.step = Step::kOver;
      failed(guest.peer, guest.queue, guest.why);
    } else if (guest.step == Step::kPause) {
      guest.address = 0;
      try_next(guest, guest.why);
    } else {
      ++guest.address;
      try_next(guest, "no answer");
    }
  }
  std::erase_if(guests_, [&](const Guest& guest) {
    if (guest.step != Step::kOver) return false;
    n_strangers_ -= guest.mine ? 0 : 1;
    return true;
  });
}

void TcpMeeting::close() {
  guests_.clear();
  listener_.reset();
  events_.reset();
}

void TcpMeeting::accept() {
  for (int taken = 0; taken < kPerCall; ++taken) {
    TcpSocket socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      const bool none_left = errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
      return none_left ? void() : listen_again(Clock::now() + kPause);
    }
    if (n_strangers_ >= kMostStrangers) {
      // Who has got a reply may count on the connection from now on: that one goes last.
      auto oldest = std::ranges::find(guests_, Step::kGreeting, &Guest::step);
      if (oldest == guests_.end()) oldest = std::ranges::find(guests_, Step::kProof, &Guest::step);
      if (oldest != guests_.end()) oldest->step = Step::kOver, oldest->socket.reset();
    }
    ++n_strangers_;
    Guest& guest = guests_.emplace_back(Guest{Step::kGreeting, false});
    guest.socket = std::move(socket);
    epoll_event event{.events = EPOLLIN, .data = {.ptr = &guest}};
    guest.until = Clock::now() + kPerStranger;
    if (epoll_ctl(events_.get(), EPOLL_CTL_ADD, guest.socket.get(), &event) != 0) {
      guest.step = Step::kOver;
    }
  }
}

// max(): from now on. A listener without a descriptor for its guest stays readable.
void TcpMeeting::listen_again(Clock::time_point at) {
  listens_again_ = at;
  const bool now = at == Clock::time_point::max();
  epoll_event event{.events = now ? EPOLLIN : 0u, .data = {.ptr = nullptr}};
  (void)epoll_ctl(events_.get(), EPOLL_CTL_MOD, listener_.get(), &event);
}

// The next address, or after the last one all again, after a pause.
void TcpMeeting::try_next(Guest& guest, std::string why) {
  guest.why = std::move(why);
  guest.n_arrived = 0;
  guest.socket.reset();
  for (; guest.address < guest.addresses.size(); ++guest.address) {
    const sockaddr_in6& address = guest.addresses[guest.address];
    guest.socket = tcp_connect(address);
    if (!guest.socket) {
      guest.why = text(tcp_text(address), ": ", std::strerror(errno));
      continue;
    }
    epoll_event event{.events = EPOLLOUT, .data = {.ptr = &guest}};
    if (epoll_ctl(events_.get(), EPOLL_CTL_ADD, guest.socket.get(), &event) != 0) continue;
    guest.step = Step::kConnect;
    guest.until = Clock::now() + kPerAddress;
    return;
  }
  guest.step = Step::kPause;
  guest.until = Clock::now() + kPause;
}

void TcpMeeting::await(Guest& guest, Step step, bool room) {
  guest.step = step;
  guest.n_arrived = 0;
  epoll_event event{.events = room ? EPOLLOUT : EPOLLIN, .data = {.ptr = &guest}};
  (void)epoll_ctl(events_.get(), EPOLL_CTL_MOD, guest.socket.get(), &event);
}

bool TcpMeeting::take(Guest& guest, void* to, std::size_t bytes) {
  while (guest.n_arrived < bytes) {
    const ssize_t got = recv(guest.socket.get(), guest.arrived.data() + guest.n_arrived,
                             bytes - guest.n_arrived, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return false;
    if (got <= 0) throw Error(ErrorKind::kSystem, "it closed the connection");
    guest.n_arrived += static_cast<std::size_t>(got);
  }
  std::memcpy(to, guest.arrived.data(), bytes);
  return true;
}

// A new connection has room for it.
bool TcpMeeting::send(Guest& guest, const void* from, std::size_t bytes) {
  return ::send(guest.socket.get(), from, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(bytes);
}

void TcpMeeting::take_greeting(Guest& guest) {
  if (!take(guest, &guest.greeting, sizeof guest.greeting)) return;
  const TcpGreeting& greeting = guest.greeting;
  const bool ours = greeting.magic == TcpGreeting::kMagic && greeting.size == size_ &&
                    greeting.to == rank_ && greeting.from >= 0 && greeting.from < size_ &&
                    greeting.from != rank_ && greeting.queue < options_.queues;
  guest.peer = ours ? greeting.from : -1;
  guest.queue = greeting.queue;
  guest.reply.nonce = fresh();
  guest.reply.code = code('a', guest);
  if (!ours || !send(guest, &guest.reply, sizeof guest.reply)) {
    throw Error(ErrorKind::kMismatch, "a stranger");
  }
  await(guest, Step::kProof, false);
}

void TcpMeeting::step(Guest& guest, const std::function<void(Established)>& established) {
  try {
    switch (guest.step) {
      case Step::kConnect: {
        int error = 0;
        socklen_t length = sizeof error;
        getsockopt(guest.socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
        if (error != 0) throw Error(ErrorKind::kSystem, std::strerror(error));
        guest.greeting.nonce = fresh();
        if (!send(guest, &guest.greeting, sizeof guest.greeting)) {
          throw Error(ErrorKind::kSystem, "it takes no greeting");
        }
        return await(guest, Step::kReply, false);
      }
      case Step::kReply: {
        if (!take(guest, &guest.reply, sizeof guest.reply)) return;
        const TcpProof proof{code('c', guest)};
        if (guest.reply.code != code('a', guest) || !send(guest, &proof, sizeof proof)) {
          throw Error(ErrorKind::kMismatch, "it does not know this job");
        }
        return establish(guest, established);
      }
      case Step::kGreeting:
        return take_greeting(guest);
      case Step::kProof: {
        TcpProof proof;
        if (!take(guest, &proof, sizeof proof)) return;
        if (proof.code != code('c', guest)) throw Error(ErrorKind::kMismatch, "a stranger");
        return establish(guest, established);
      }
      default:
        return;
    }
  } catch (const Error& error) {
    if (!guest.mine) {
      guest.step = Step::kOver;
      guest.until = {};
      return;
    }
    const std::string where = tcp_text(guest.addresses[guest.address]);
    ++guest.address;
    try_next(guest, text(where, ": ", error.what()));
  }
}

void TcpMeeting::establish(Guest& guest, const std::function<void(Established)>& established) {
  (void)epoll_ctl(events_.get(), EPOLL_CTL_DEL, guest.socket.get(), nullptr);
  tcp_tune(guest.socket.get(), options_.timeout_s);
  guest.step = Step::kOver;
  guest.until = {};
  established({std::move(guest.socket), guest.peer, guest.queue, guest.mine});
}

}  // namespace pgasdl

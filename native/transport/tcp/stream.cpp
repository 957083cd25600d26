#include "transport/tcp/stream.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace pgasdl {
namespace {

constexpr int kPieces = 64;  // of memory, in one call that sends
constexpr std::size_t kStaged = 8192;
constexpr std::uint64_t kShort = 256;
constexpr std::uint64_t kBytesPerCall = 4ull << 20;  // received, so that no peer waits for long

// What one end sends is in order with what the other end does once it has arrived. The thread
// sanitizer cannot see that, so both take a lock of that direction.
#ifdef __SANITIZE_THREAD__
std::unique_lock<std::mutex> on_the_way(int socket, bool out) {
  static std::array<std::mutex, 4096> lines;
  const auto port = [&](auto&& name) {
    sockaddr_in6 address{};
    socklen_t length = sizeof address;
    name(socket, reinterpret_cast<sockaddr*>(&address), &length);
    return std::size_t{ntohs(address.sin6_port)};
  };
  const std::size_t mine = port(getsockname), theirs = port(getpeername);
  return std::unique_lock(lines[(out ? 7 * mine + theirs : 7 * theirs + mine) % lines.size()]);
}
#else
int on_the_way(int, bool) { return 0; }
#endif

}  // namespace

TcpStream::TcpStream(TcpSocket socket, int events, Rank peer)
    : peer_(peer), events_(events), socket_(std::move(socket)), staged_(kStaged) {}

void TcpStream::begin_events() {
  const std::lock_guard lock(leave_mutex_);
  epoll_event event{.events = EPOLLIN, .data = {.ptr = this}};
  if (epoll_ctl(events_, EPOLL_CTL_ADD, socket_.get(), &event) != 0) {
    throw_system("epoll_ctl", errno);
  }
}

void TcpStream::push(const TcpFrame& frame, const std::byte* data,
                     std::shared_ptr<const void> keep) {
  leaving_.push_back({frame, data, std::move(keep), 0});
}

void TcpStream::flush() {
  const std::lock_guard lock(leave_mutex_);
  flush_locked();
}

void TcpStream::take_over() {
  const std::lock_guard lock(leave_mutex_);
  copy_leaving(nullptr);
}

void TcpStream::abandon(const std::shared_ptr<const void>& memory) {
  const std::scoped_lock lock(leave_mutex_, arrive_mutex_);
  copy_leaving(memory);
  if (keep_ != memory) return;
  target_ = nullptr;
  keep_.reset();
}

void TcpStream::copy_leaving(const std::shared_ptr<const void>& keep) {
  for (Leaving& each : leaving_) {
    if (each.data == nullptr || each.keep != keep) continue;
    auto copy =
        std::make_shared<std::vector<std::byte>>(each.data, each.data + each.frame.payload());
    each.data = copy->data();
    each.keep = std::move(copy);
  }
}

void TcpStream::flush_locked() {
  while (!leaving_.empty() && !ended()) {
    std::array<iovec, kPieces> pieces;
    std::size_t n = 0;
    std::uint64_t all = 0;
    const auto add = [&](const std::byte* from, std::uint64_t bytes, std::uint64_t skip) {
      if (skip >= bytes) return;
      pieces[n++] = {const_cast<std::byte*>(from + skip), bytes - skip};
      all += bytes - skip;
    };
    for (const Leaving& each : leaving_) {
      if (n + 2 > pieces.size()) break;
      add(reinterpret_cast<const std::byte*>(&each.frame), sizeof each.frame, each.sent);
      if (each.data == nullptr) continue;
      const std::uint64_t header = sizeof each.frame;
      add(each.data, each.frame.payload(), each.sent > header ? each.sent - header : 0);
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = n;
    std::array<std::byte, kShort> together;  // costs less than a list does in the kernel
    std::byte* end = together.data();
    for (std::size_t i = 0; i < n && all <= kShort; ++i) {
      end = std::copy_n(static_cast<const std::byte*>(pieces[i].iov_base), pieces[i].iov_len, end);
    }
    ssize_t sent;
    {
      [[maybe_unused]] const auto line = on_the_way(socket_.get(), true);
      constexpr int kHow = MSG_NOSIGNAL | MSG_DONTWAIT;
      sent = all <= kShort ? send(socket_.get(), together.data(), all, kHow)
                           : sendmsg(socket_.get(), &message, kHow);
    }
    if (sent < 0) {
      if (errno == EINTR) continue;
      // After an end, what had arrived before is still taken: receive() then ends the connection.
      if (errno == EPIPE || errno == ECONNRESET) {
        leaving_.clear();
      } else if (errno != EAGAIN && errno != ENOBUFS && errno != ENOMEM) {
        return end_locked(std::strerror(errno));
      }
      break;
    }
    auto left = static_cast<std::uint64_t>(sent);
    while (left != 0) {
      Leaving& first = leaving_.front();
      const std::uint64_t more = std::min(left, first.bytes() - first.sent);
      first.sent += more;
      left -= more;
      if (first.sent == first.bytes()) leaving_.pop_front();
    }
    if (static_cast<std::uint64_t>(sent) < all) break;  // the kernel has no room
  }
  watch(!leaving_.empty());
}

void TcpStream::watch(bool room) {
  if (room == watches_room_ || ended()) return;
  watches_room_ = room;
  epoll_event event{.events = EPOLLIN, .data = {.ptr = this}};
  if (room) event.events |= EPOLLOUT;
  (void)epoll_ctl(events_, EPOLL_CTL_MOD, socket_.get(), &event);
}

void TcpStream::receive() {
  const std::unique_lock lock(arrive_mutex_, std::try_to_lock);
  if (!lock.owns_lock() || ended()) return;
  try {
    for (std::uint64_t taken = 0; taken < kBytesPerCall;) {
      std::array<iovec, 2> places;
      std::size_t n = 0;
      if (missing_ != 0 && target_ != nullptr) places[n++] = {target_, missing_};
      places[n++] = {staged_.data() + n_staged_, staged_.size() - n_staged_};
      msghdr message{};
      message.msg_iov = places.data();
      message.msg_iovlen = n;
      const ssize_t got =
          n == 1 ? recv(socket_.get(), places[0].iov_base, places[0].iov_len, MSG_DONTWAIT)
                 : recvmsg(socket_.get(), &message, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == ENOBUFS || errno == ENOMEM)) break;
      if (got <= 0) {
        const std::string why = got == 0 ? "the peer closed it" : std::strerror(errno);
        (void)epoll_ctl(events_, EPOLL_CTL_DEL, socket_.get(), nullptr);
        return closed(why);
      }
      (void)on_the_way(socket_.get(), false);
      take(static_cast<std::size_t>(got));
      taken += static_cast<std::uint64_t>(got);
      if (static_cast<std::size_t>(got) < places[0].iov_len) break;  // most likely all
    }
    drained();
  } catch (const std::exception& error) {
    end(error.what());
  }
}

void TcpStream::take(std::size_t got) {
  if (missing_ != 0 && target_ != nullptr) {
    const std::uint64_t there = std::min<std::uint64_t>(got, missing_);
    target_ += there;
    missing_ -= there;
    got -= there;
    if (missing_ != 0) return;
    arrived();
  }
  n_staged_ += got;
  std::size_t used = 0;
  for (;;) {
    if (missing_ != 0) {
      const std::uint64_t here = std::min<std::uint64_t>(n_staged_ - used, missing_);
      if (target_ != nullptr) {
        std::memcpy(target_, staged_.data() + used, here);
        target_ += here;
      }
      used += here;
      missing_ -= here;
      if (missing_ != 0) break;
      arrived();
    }
    if (n_staged_ - used < sizeof frame_) break;
    std::memcpy(&frame_, staged_.data() + used, sizeof frame_);
    used += sizeof frame_;
    target_ = begin(frame_, keep_);
    missing_ = frame_.payload();
    if (missing_ == 0) arrived();
  }
  n_staged_ -= used;
  std::memmove(staged_.data(), staged_.data() + used, n_staged_);
}

void TcpStream::arrived() {
  finish(frame_);
  keep_.reset();
}

void TcpStream::end(const std::string& why) {
  const std::lock_guard lock(leave_mutex_);
  end_locked(why);
}

void TcpStream::end_locked(const std::string& why) {
  if (ended_.exchange(true)) return;
  (void)epoll_ctl(events_, EPOLL_CTL_DEL, socket_.get(), nullptr);
  (void)shutdown(socket_.get(), SHUT_RDWR);
  leaving_.clear();
  ended_locked(why);
}

bool TcpStream::retire() {
  const std::scoped_lock lock(leave_mutex_, arrive_mutex_);
  if (!socket_) return false;
  socket_.reset();
  keep_.reset();
  staged_ = {};
  return true;
}

}  // namespace pgasdl

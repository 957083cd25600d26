#include "transport/router.hpp"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>

#include "sys/packed.hpp"

namespace pgasdl {
namespace {

// Appends a transport's words, preceded by their length.
void append(std::string& all, const std::string& part) {
  all += packed(static_cast<std::uint32_t>(part.size()));
  all += part;
}

std::vector<std::string> parts_of(Rank peer, std::string_view all, std::size_t count) {
  std::vector<std::string> parts;
  while (parts.size() < count && all.size() >= sizeof(std::uint32_t)) {
    const auto bytes = take_packed<std::uint32_t>(all, "words", peer);
    if (all.size() < bytes) break;
    parts.emplace_back(all.substr(0, bytes));
    all.remove_prefix(bytes);
  }
  if (parts.size() != count || !all.empty()) {
    throw Error(ErrorKind::kMismatch,
                text("rank ", peer,
                     "'s words are not of these transports: all ranks need the same version and "
                     "the same PGASDL_TRANSPORT"),
                peer);
  }
  return parts;
}

}  // namespace

Router::Router(std::vector<std::unique_ptr<Transport>> transports, std::vector<std::size_t> routes)
    : transports_(std::move(transports)),
      routes_(std::move(routes)),
      ready_(epoll_create1(EPOLL_CLOEXEC)) {
  if (!ready_) throw_system("epoll_create1", errno);
  for (const auto& transport : transports_) {
    const int descriptor = transport->service_descriptor();
    if (descriptor < 0) continue;
    epoll_event readable{};
    readable.events = EPOLLIN;
    if (epoll_ctl(ready_.get(), EPOLL_CTL_ADD, descriptor, &readable) != 0) {
      throw_system("epoll_ctl", errno);
    }
  }
}

std::string Router::describe() const {
  std::string all;
  for (const auto& transport : transports_) {
    const std::string words = transport->describe();
    if (!words.empty()) all += text(all.empty() ? "" : "; ", words);
  }
  return all;
}

std::string Router::endpoint() {
  std::string all;
  for (const auto& transport : transports_) append(all, transport->endpoint());
  return all;
}

void Router::connect(Rank peer, const std::string& endpoint) {
  const std::size_t route = routes_[static_cast<std::size_t>(peer)];
  transports_[route]->connect(peer, parts_of(peer, endpoint, transports_.size())[route]);
}

void Router::set_wake_word(Rank peer, WakeWord* wake_word) {
  // Every transport that raises this rank's own flags wakes this rank.
  for (const auto& transport : transports_) transport->set_wake_word(peer, wake_word);
}

std::string Router::publish(LocalSegment& segment, std::span<const Rank> peers) {
  std::string all;
  std::vector<Rank> reached;
  for (std::size_t route = 0; route < transports_.size(); ++route) {
    reached.clear();
    std::copy_if(peers.begin(), peers.end(), std::back_inserter(reached),
                 [&](Rank peer) { return routes_[static_cast<std::size_t>(peer)] == route; });
    append(all, reached.empty() ? "" : transports_[route]->publish(segment, reached));
  }
  return all;
}

RemoteSegment Router::attach(Rank peer, const std::string& description, int device,
                             Deadline deadline) {
  const std::size_t route = routes_[static_cast<std::size_t>(peer)];
  return transports_[route]->attach(peer, parts_of(peer, description, transports_.size())[route],
                                    device, deadline);
}

std::string Router::refuses_device(int device) const {
  for (const auto& transport : transports_) {
    if (auto why = transport->refuses_device(device); !why.empty()) return why;
  }
  return "";
}

void Router::retract(const LocalSegment& segment) {
  for (const auto& transport : transports_) transport->retract(segment);
}

void Router::end_service() {
  for (const auto& transport : transports_) transport->end_service();
  ready_.reset();
}

bool Router::service() {
  bool more = false;
  for (const auto& transport : transports_) more |= transport->service();
  return more;
}

bool Router::complete(QueueId queue) {
  bool all = true;
  for (const auto& transport : transports_) all &= transport->complete(queue);
  return all;
}

bool Router::sent(QueueId queue) {
  bool all = true;
  for (const auto& transport : transports_) all &= transport->sent(queue);
  return all;
}

std::size_t Router::connections(QueueId queue) const {
  std::size_t all = 0;
  for (const auto& transport : transports_) all += transport->connections(queue);
  return all;
}

bool Router::needs_progress() const {
  return std::any_of(transports_.begin(), transports_.end(),
                     [](const auto& transport) { return transport->needs_progress(); });
}

bool Router::receives_in_progress() const {
  return std::any_of(transports_.begin(), transports_.end(),
                     [](const auto& transport) { return transport->receives_in_progress(); });
}

void Router::progress() {
  for (const auto& transport : transports_) {
    if (transport->needs_progress()) transport->progress();
  }
}

}  // namespace pgasdl

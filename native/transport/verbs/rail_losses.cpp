// Drops rails, and takes them up again.
#include <cstdio>

#include "transport/verbs/device.hpp"
#include "transport/verbs/rails.hpp"

namespace pgasdl {
namespace {

constexpr auto kBetweenLooks = std::chrono::milliseconds(50);  // at ports

}  // namespace

std::string VerbsRails::name_of(std::size_t rail) const {
  return rails_[rail]->device().port_name();
}

std::string VerbsRails::describe() const {
  std::string words = text("RDMA by stripes of ", options_.stripe, " bytes over");
  for (std::size_t rail = 0; rail < rails_.size(); ++rail) words += text(" ", name_of(rail));
  const std::lock_guard lock(rails_mutex_);
  for (Rank peer = 0; peer < size_; ++peer) {
    const Peer& known = peers_[static_cast<std::size_t>(peer)];
    for (std::size_t rail = 0; rail < known.dropped.size(); ++rail) {
      const std::string& why = known.dropped[rail].why;
      if (!why.empty())
        words += text("; ", name_of(rail), " to rank ", peer, " was dropped: ", why);
    }
  }
  return words;
}

template <typename Call>
void VerbsRails::for_each_connection(Rank peer, Call&& call) {
  for (RailConnection* connection = connections_.load(std::memory_order_acquire);
       connection != nullptr; connection = connection->next) {
    if (connection->peer() == peer) call(*connection);
  }
}

bool VerbsRails::drop(Rank peer, std::size_t rail, const std::string& why) {
  const std::lock_guard lock(rails_mutex_);
  Peer& known = peers_[static_cast<std::size_t>(peer)];
  const std::uint32_t bit = 1u << rail;
  const std::uint32_t carrying = known.carrying.load(std::memory_order_relaxed);
  if ((carrying & bit) == 0) return true;
  if (carrying == bit) return false;
  known.carrying.store(carrying & ~bit, std::memory_order_release);
  known.dropped[rail] = {rails_[rail]->round(peer), why};
  rails_[rail]->part(peer);
  for_each_connection(peer, [&](RailConnection& connection) { connection.drop(rail); });
  dropping_.store(true, std::memory_order_release);
  if (options_.warns) {
    const std::string line = text("pgasdl: rank ", rank_, ": the rail by ", name_of(rail),
                                  " to rank ", peer, " is dropped: ", why, "\n");
    std::fputs(line.c_str(), stderr);
  }
  return true;
}

void VerbsRails::announce(Rank peer, VerbsRailNews news) {
  const std::lock_guard lock(rails_mutex_);
  const Peer& known = peers_[static_cast<std::size_t>(peer)];
  const Dropped& dropped = known.dropped[news.rail];
  if (dropped.why.empty()) return;  // it was taken up again meanwhile
  news.round = dropped.round;
  const std::uint32_t carrying = known.carrying.load(std::memory_order_relaxed);
  for (std::size_t rail = 0; rail < rails_.size(); ++rail) {
    if ((carrying >> rail & 1) == 0) continue;
    try {
      rails_[rail]->announce(peer, news);
    } catch (const Error&) {
      // There is no route now; the announcement is repeated.
    }
  }
}

void VerbsRails::look_at_ports() {
  const auto now = Clock::now();
  if (now < next_look_) return;
  next_look_ = now + kBetweenLooks;
  for (std::size_t rail = 0; rails_.size() > 1 && rail < rails_.size(); ++rail) {
    if (rails_[rail]->port_is_up()) continue;
    for (Rank peer = 0; peer < size_; ++peer) {
      if (peer != rank_) (void)drop(peer, rail, text("port ", name_of(rail), " is down"));
    }
  }
}

// A peer has taken a rail up again, by reconnect().
void VerbsRails::look_at_renewals() {
  for (std::size_t rail = 0; rail < rails_.size(); ++rail) {
    const std::uint64_t renewals = rails_[rail]->renewals();
    if (renewals == renewals_[rail]) continue;
    renewals_[rail] = renewals;
    const std::lock_guard lock(rails_mutex_);
    for (Rank peer = 0; peer < size_; ++peer) {
      Peer& known = peers_[static_cast<std::size_t>(peer)];
      if (known.dropped.empty() || known.dropped[rail].why.empty()) continue;
      const std::uint32_t round = rails_[rail]->round(peer);
      if (round == known.dropped[rail].round || round == VerbsTransport::kRankLeft) continue;
      known.dropped[rail] = {};
      known.carrying.fetch_or(1u << rail, std::memory_order_release);
      for_each_connection(peer, [&](RailConnection& connection) { connection.renew(rail); });
    }
  }
}

// The rail was dropped and taken up again, and look_at_renewals() has not noticed yet.
bool VerbsRails::is_of_before(Rank peer, std::size_t rail, std::uint32_t round) const {
  const std::lock_guard lock(rails_mutex_);
  const Dropped& dropped = peers_[static_cast<std::size_t>(peer)].dropped[rail];
  return !dropped.why.empty() && dropped.round != round;
}

void VerbsRails::answer(const Heard& heard) {
  const auto& [from, news] = heard;
  const Peer& known = peers_[static_cast<std::size_t>(from)];
  if (news.rail >= rails_.size() || news.queue >= queues_.size() ||
      (known.common >> news.rail & 1) == 0) {
    return;
  }
  VerbsTransport& rail = *rails_[news.rail];
  const std::uint32_t round = rail.round(from);
  if (news.round < round && round != VerbsTransport::kRankLeft) {
    // The sender does not know yet that the rail was taken up again; asking to connect reports it.
    (void)rail.post_write(news.queue, from, {}, nullptr);
  }
  if (news.round != round || is_of_before(from, news.rail, round)) return;
  RailConnection& connection = make(news.queue, from);
  if (!drop(from, news.rail, text("rank ", from, " has dropped it"))) {
    return connection.fail(Error(
        ErrorKind::kPeerLost,
        text("rank ", from, " has dropped the rail by ", name_of(news.rail), ", the last one"),
        from));
  }
  if (connection.peer_dropped(news.rail, news.taken, news.known != 0)) {
    announce(from, connection.news_of(news.rail));
  }
}

// One thread at a time; another one does not wait for it.
void VerbsRails::look_after_rails() {
  const std::unique_lock lock(care_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  look_at_ports();
  look_at_renewals();
  if (!dropping_.load(std::memory_order_acquire) && !has_heard_.load(std::memory_order_acquire)) {
    return;
  }
  for (const auto& rail : rails_) rail->listen();
  std::vector<Heard> heard;
  {
    const std::lock_guard heard_lock(heard_mutex_);
    heard.swap(heard_);
    has_heard_.store(false, std::memory_order_relaxed);
  }
  for (const Heard& one : heard) {
    try {
      answer(one);
    } catch (const Error&) {
      // The sender repeats its report.
    }
  }
  dropping_.store(false, std::memory_order_release);
  bool dropping = false;
  std::vector<std::size_t> to_announce;
  for (RailConnection* connection = connections_.load(std::memory_order_acquire);
       connection != nullptr; connection = connection->next) {
    to_announce.clear();
    dropping |= connection->look_after_drops(to_announce);
    for (const std::size_t rail : to_announce)
      announce(connection->peer(), connection->news_of(rail));
  }
  if (dropping) dropping_.store(true, std::memory_order_release);
}

void VerbsRails::reconnect(Rank peer) {
  const std::lock_guard care(care_mutex_);
  const std::lock_guard lock(rails_mutex_);
  Peer& known = peers_[static_cast<std::size_t>(peer)];
  std::uint32_t carrying = 0;
  for (std::size_t rail = 0; rail < rails_.size(); ++rail) {
    const std::uint32_t bit = 1u << rail;
    const bool carries = (known.carrying.load(std::memory_order_relaxed) & bit) != 0;
    if ((known.common & bit) == 0 || (!carries && !rails_[rail]->port_is_up())) continue;
    rails_[rail]->reconnect(peer);
    known.dropped[rail] = {};
    carrying |= bit;
  }
  known.carrying.store(carrying, std::memory_order_release);
  for_each_connection(peer, [&](RailConnection& connection) { connection.clear(carrying); });
  for (RailQueue& queue : queues_) queue.drop_faults(peer);
}

bool VerbsRails::forget(Rank peer) {
  const Error lost(ErrorKind::kPeerLost, text("rank ", peer, " is lost"), peer);
  for_each_connection(peer, [&](RailConnection& connection) { connection.fail(lost); });
  for (const auto& rail : rails_) rail->forget(peer);
  return true;
}

}  // namespace pgasdl

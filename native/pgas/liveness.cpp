#include "pgas/liveness.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "sys/thread.hpp"

namespace pgasdl {

std::string_view name(Health health) {
  constexpr std::array<std::string_view, 5> kNames{"healthy", "died", "stopped", "failed",
                                                   "closed"};
  return kNames[static_cast<std::size_t>(health)];
}

Liveness::Liveness(Rank rank, Rank size, const Options& options)
    : rank_(rank),
      size_(size),
      options_(options),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      endings_(epoll_create1(EPOLL_CLOEXEC)),
      accepted_(std::make_unique<std::atomic<bool>[]>(static_cast<std::size_t>(size))) {
  if (!wake_ || !endings_) throw_system("eventfd or epoll", errno);
  if (options.stopped_after * 1e3 < kLeastHeartbeats * options.heartbeat_ms) {
    throw Error(ErrorKind::kSystem,
                text("a heartbeat every ", options.heartbeat_ms, " ms and stopped_after ",
                     options.stopped_after, " s: at least ", kLeastHeartbeats,
                     " heartbeats have to fit in"));
  }
}

Liveness::~Liveness() { stop(); }

void Liveness::start(Transport* transport, std::function<void()> look_after_streams) {
  look_after_streams_ = std::move(look_after_streams);
  transport_ = transport;
  thread_ = thread_without_signals([this] { run(); });
}

void Liveness::watch(std::vector<ControlBlock*> blocks, std::span<const pid_t> pids,
                     std::unique_ptr<Gossip> gossip) {
  const std::lock_guard lock(watch_mutex_);
  blocks_ = std::move(blocks);
  gossip_ = std::move(gossip);
  own_ = blocks_[static_cast<std::size_t>(rank_)];
  own_->heartbeat.store(1, std::memory_order_relaxed);
  pids_.assign(pids.begin(), pids.end());
  processes_.resize(blocks_.size());
  const auto now = Clock::now();
  last_beat_ = now;
  heartbeats_.emplace(blocks_.size(), std::chrono::milliseconds(options_.heartbeat_ms),
                      options_.stopped_after, now);
  for (std::size_t peer = 0; peer < blocks_.size(); ++peer) {
    if (pids[peer] == 0 || static_cast<Rank>(peer) == rank_) continue;
    watch_process(peer, pids[peer]);
  }
  look_at_processes();
  eventfd_write(wake_.get(), 1);
}

void Liveness::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_release);
  eventfd_write(wake_.get(), 1);
  thread_.join();
  transport_->end_service();
  const std::scoped_lock lock(watch_mutex_, notices_mutex_);
  processes_.clear();
  endings_.reset();
  wake_.reset();
}

void Liveness::run() {
  pthread_setname_np(pthread_self(), "pgasdl-watch");
  constexpr int kBeginning = 5;  // ms between first beats, while connections are made
  bool takes_leave = false;
  bool begins = false;
  bool more = false;
  while (!stopping_.load(std::memory_order_acquire)) {
    std::array<pollfd, 3> watched{{{wake_.get(), POLLIN, 0},
                                   {transport_->service_descriptor(), POLLIN, 0},
                                   {takes_leave ? -1 : endings_.get(), POLLIN, 0}}};
    int period = post_abort_notices() ? static_cast<int>(options_.heartbeat_ms) : 1;
    if (begins) period = std::min(period, kBeginning);
    poll(watched.data(), watched.size(), more ? 0 : period);
    if (watched[0].revents != 0) {
      eventfd_t ignored;
      eventfd_read(wake_.get(), &ignored);
    }
    if (more || watched[1].revents != 0) more = transport_->service();
    const std::unique_lock lock(watch_mutex_, std::try_to_lock);
    takes_leave = !lock.owns_lock();
    if (takes_leave) {
      // This rank takes leave under the lock: a lost peer may block it in the transport, and only
      // progress from here ends that.
      transport_->progress();
      continue;
    }
    if (own_ == nullptr) continue;
    look_at_processes();
    look_at_heartbeats();
    if (gossip_ != nullptr) exchange_gossip();
    begins = gossip_ != nullptr && !gossip_->begun(own_->states());
    if (transport_->needs_progress()) transport_->progress();
    look_after_streams_();
  }
}

void Liveness::watch_process(std::size_t peer, pid_t pid) {
  processes_[peer] = ProcessWatch(pid);
  epoll_event event{.events = EPOLLIN, .data = {.u64 = peer}};
  const int descriptor = processes_[peer].descriptor();
  if (descriptor < 0 || epoll_ctl(endings_.get(), EPOLL_CTL_ADD, descriptor, &event) != 0) {
    unpolled_.push_back(peer);
  }
}

void Liveness::look_at_processes() {
  std::erase_if(unpolled_, [&](std::size_t peer) { return take_note(peer); });
  std::array<epoll_event, 64> events;
  const int n = epoll_wait(endings_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < n; ++i) take_note(static_cast<std::size_t>(events[i].data.u64));
}

bool Liveness::take_note(std::size_t peer) {
  if (!processes_[peer].ended()) return false;
  // A forked child may share the descriptor, so closing it would not remove it from the set.
  const int descriptor = processes_[peer].descriptor();
  if (descriptor >= 0) epoll_ctl(endings_.get(), EPOLL_CTL_DEL, descriptor, nullptr);
  processes_[peer] = {};
  note_end(static_cast<Rank>(peer));
  return true;
}

void Liveness::look_at_heartbeats() {
  own_->heartbeat.fetch_add(1, std::memory_order_relaxed);
  const auto now = Clock::now();
  longest_silence_ = std::max(longest_silence_.load(), now - last_beat_.load());
  last_beat_ = now;
  heartbeats_->look(now);
  for (std::size_t peer = 0; peer < blocks_.size(); ++peer) {
    if (blocks_[peer] == nullptr || static_cast<Rank>(peer) == rank_) continue;
    judge(static_cast<Rank>(peer), blocks_[peer]->heartbeat.load(std::memory_order_relaxed));
  }
  if (gossip_ == nullptr) return;
  for (const Rank peer : gossip_->ranks()) {
    judge(peer, gossip_->beat(peer), gossip_->is_neighbour(peer));
  }
}

void Liveness::judge(Rank peer, std::uint64_t seen, bool begun) {
  const auto place = static_cast<std::size_t>(peer);
  if (!heartbeats_->stopped(place, seen, begun) || health(peer) != Health::kHealthy) return;
  // On a busy machine the watch may be late although the rank is alive.
  if (pids_[place] != 0 && has_runnable_thread(pids_[place])) {
    heartbeats_->restart(place);
  } else {
    report(peer, Health::kStopped);
  }
}

void Liveness::exchange_gossip() {
  for (const Rank peer : gossip_->ranks()) hear(peer);
  // Ranks that failed or left may have done so because of others, so those come first.
  for (const bool later : {false, true}) {
    for (std::size_t number = 0; number < gossip_->neighbours().size(); ++number) {
      if (gossip_->neighbours()[number] < 0) continue;
      for (Rank of = 0; of < size_; ++of) {
        const Health announced = gossip_->announced(number, of);
        if ((announced == Health::kFailed || announced == Health::kClosed) == later)
          learn(of, announced);
      }
    }
  }
  announce_gossip();
}

void Liveness::learn(Rank of, Health announced) {
  if (announced != Health::kHealthy && health(of) == Health::kHealthy) report(of, announced);
}

void Liveness::hear(Rank peer) {
  if (gossip_ == nullptr) return;
  const Gossip::Words words = gossip_->words(peer);
  if (words.cause.rank >= 0) learn(words.cause.rank, words.cause.how);  // the cause comes first
  learn(peer, words.own);
}

void Liveness::kill(Rank peer) {
  const std::lock_guard lock(watch_mutex_);
  if (processes_.empty()) return;  // closed
  (void)processes_[static_cast<std::size_t>(peer)].kill();
}

void Liveness::note_end(Rank peer) {
  hear(peer);
  learn(peer, Health::kDied);
}

void Liveness::announce_gossip() {
  Gossip::Cause cause{static_cast<Rank>(own_->first.load(std::memory_order_relaxed)) - 1};
  if (cause.rank >= 0) cause.how = health(cause.rank);
  gossip_->announce(own_->states(), cause, [&](Rank peer) { note_end(peer); });
}

void Liveness::announce(AbortNotice notice) {
  if (post(notice)) return;
  const std::lock_guard lock(notices_mutex_);
  abort_notices_.push_back(std::move(notice));
  eventfd_write(wake_.get(), 1);
}

bool Liveness::post(const AbortNotice& notice) {
  // A dead peer no longer waits, and a rank that is fenced off must not write.
  if (health(notice.peer) != Health::kHealthy || health(rank_) != Health::kHealthy) return true;
  try {
    return transport_->post_write(notice.queue, notice.peer, {}, &notice.flag);
  } catch (const Error& error) {
    return error.kind() == ErrorKind::kPeerLost;
  }
}

bool Liveness::post_abort_notices() {
  const std::lock_guard lock(notices_mutex_);
  if (abort_notices_.empty()) return true;
  transport_->progress();
  std::erase_if(abort_notices_, [&](const AbortNotice& notice) { return post(notice); });
  return abort_notices_.empty();
}

void Liveness::finish_announcing(Deadline deadline) {
  while (!post_abort_notices() && !deadline.passed()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Liveness::take_leave(Deadline deadline) {
  const std::lock_guard lock(watch_mutex_);
  if (gossip_ == nullptr || own_ == nullptr) return;
  for (;;) {
    announce_gossip();
    transport_->progress();
    if (gossip_->announced_all(own_->states()) || deadline.passed()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Liveness::report(Rank lost, Health how) {
  const bool news = how != Health::kClosed && lost != rank_ && health(lost) == Health::kHealthy;
  for (ControlBlock* block : blocks_) {
    if (block == nullptr) continue;
    Health expected = Health::kHealthy;
    auto& state = block->states()[static_cast<std::size_t>(lost)];
    if (!state.compare_exchange_strong(expected, how, std::memory_order_acq_rel)) continue;
    if (how != Health::kClosed) {
      // The first loss is the cause: others then leave because of it.
      std::uint32_t none = 0;
      block->first.compare_exchange_strong(none, static_cast<std::uint32_t>(lost + 1),
                                           std::memory_order_relaxed);
      block->finder.store(static_cast<std::uint32_t>(rank_ + 1), std::memory_order_relaxed);
      block->alarm.fetch_add(1, std::memory_order_acq_rel);
    }
    block->gone.fetch_add(1, std::memory_order_release);
    block->wake_word.wake();
  }
  if (!news) return;
  // Later, so that whoever finds its requests lost finds the reason. It may go on, if it stopped.
  if (how == Health::kStopped && gossip_ != nullptr) gossip_->tell_lost(lost, how);
  transport_->lost(lost);
}

void Liveness::pass_on() {
  if (own_ == nullptr) return;
  for (Rank peer = 0; peer < size_; ++peer) {
    const Health state = health(peer);
    if (peer != rank_ && state != Health::kHealthy && state != Health::kClosed) report(peer, state);
  }
}

bool Liveness::everybody_left() const {
  if (own_ == nullptr || size_ == 1) return false;
  for (Rank peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && health(peer) == Health::kHealthy) return false;
  }
  return true;
}

bool Liveness::end_process(Rank peer) {
  const auto place = static_cast<std::size_t>(peer);
  bool killed = false;
  for (const Deadline deadline = Deadline::in(options_.timeout);;) {
    {
      const std::lock_guard lock(watch_mutex_);
      if (processes_.empty() || !processes_[place] || processes_[place].ended()) return killed;
      const ProcessWatch& process = processes_[place];
      killed |= process.kill();
      if ((!killed && !process.ended()) || deadline.passed()) {
        throw Error(ErrorKind::kSystem,
                    text("survivors: rank ", peer, " has stopped, perhaps within a write to rank ",
                         rank_, ", and its process ", pids_[place],
                         killed ? " does not end" : " may not be ended by this one", "; kill it"),
                    peer);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::vector<Rank> Liveness::acknowledge() {
  if (health(rank_) != Health::kHealthy) refuse(rank_, "survivors");
  // Counts states, which a report sets before the alarm: a loss reported meanwhile is either
  // accepted by name or keeps the alarm raised.
  own_->first.store(0, std::memory_order_relaxed);
  std::uint32_t losses = 0;
  std::vector<Rank> ended;
  for (Rank peer = 0; peer < size_; ++peer) {
    const Health state = health(peer);
    const bool lost = state != Health::kHealthy && state != Health::kClosed;
    if (lost && !transport_->forget(peer) && state == Health::kStopped && end_process(peer)) {
      ended.push_back(peer);
    }
    accepted_[static_cast<std::size_t>(peer)].store(lost, std::memory_order_relaxed);
    losses += lost ? 1 : 0;
  }
  acknowledged_.store(losses, std::memory_order_release);
  return ended;
}

void Liveness::give_reason(std::string_view reason) {
  if (own_ == nullptr || own_->reason_bytes.load(std::memory_order_relaxed) != 0) return;
  const std::size_t bytes = std::min(reason.size(), sizeof own_->reason);
  std::memcpy(own_->reason, reason.data(), bytes);
  own_->reason_bytes.store(static_cast<std::uint32_t>(bytes), std::memory_order_release);
}

namespace {

constexpr const char* kTimedOut = " (timed out)";

}  // namespace

void SharedLine::set(std::string_view text) {
  if (text.size() > kBytes) {
    std::size_t end = kBytes;
    while (end > 0 && (text[end] & 0xc0) == 0x80) --end;  // no part of a character of UTF-8
    text = text.substr(0, end);
  }
  for (std::size_t word = 0; word < std::size(words_); ++word) {
    std::uint64_t bytes = 0;
    const std::string_view part = text.substr(std::min(text.size(), word * sizeof bytes));
    std::memcpy(&bytes, part.data(), std::min(part.size(), sizeof bytes));
    words_[word].store(bytes, std::memory_order_relaxed);
    if (part.size() < sizeof bytes) break;
  }
}

std::string SharedLine::get() const {
  std::string text;
  for (const std::atomic<std::uint64_t>& word : words_) {
    const std::uint64_t bytes = word.load(std::memory_order_relaxed);
    char part[sizeof bytes];
    std::memcpy(part, &bytes, sizeof bytes);
    text.append(part, strnlen(part, sizeof part));
    if (text.size() % sizeof bytes != 0 || part[0] == 0) break;
  }
  return text;
}

void Liveness::note_wait(std::string_view what, Clock::time_point since) {
  if (own_ == nullptr) return;
  waits_since_.store(since, std::memory_order_relaxed);
  own_->wait.set(what);
}

void Liveness::note_timeout() {
  if (own_ != nullptr) own_->wait.set(own_->wait.get() + kTimedOut);
}

std::string Liveness::own_wait() const {
  const std::string what = own_ == nullptr ? "" : own_->wait.get();
  if (what.empty()) return "";
  const std::chrono::duration<double> age =
      Clock::now() - waits_since_.load(std::memory_order_relaxed);
  return text("rank ", rank_, " waits in ", what, " for ", age.count(), " s");
}

std::string Liveness::waits_of_others(std::string_view own) const {
  constexpr int kMost = 4;
  std::string words;
  int n = 0;
  for (Rank peer = 0; own_ != nullptr && peer < size_ && n < kMost; ++peer) {
    const ControlBlock* const block = blocks_[static_cast<std::size_t>(peer)];
    if (peer == rank_ || block == nullptr || health(peer) != Health::kHealthy) continue;
    const std::string what = block->wait.get();
    if (what.empty() || what == own || what == text(own, kTimedOut)) continue;
    words += text(n++ == 0 ? "; rank " : ", rank ", peer, " waits in ", what);
  }
  return words;
}

void Liveness::note_plan(std::uint64_t fingerprint, std::uint64_t first_notification,
                         std::string_view what) {
  if (own_ == nullptr || what.empty()) return;
  const std::lock_guard lock(plans_mutex_);
  const std::uint32_t n = own_->n_plans.load(std::memory_order_relaxed);
  SharedPlan& plan = own_->plans[n % ControlBlock::kPlans];
  plan.fingerprint.store(fingerprint, std::memory_order_relaxed);
  plan.first_notification.store(first_notification, std::memory_order_relaxed);
  plan.what.set(what);
  own_->n_plans.store(n + 1, std::memory_order_release);
}

std::string Liveness::in_words(Rank lost) const {
  std::string words = text("rank ", lost, " ", name(health(lost)));
  const std::string unreached = transport_->unreached(lost);
  if (!unreached.empty()) return text(words, " (", unreached, ")");
  const ControlBlock* const block = blocks_[static_cast<std::size_t>(lost)];
  if (health(lost) != Health::kFailed || block == nullptr) return words;
  const std::size_t bytes = block->reason_bytes.load(std::memory_order_acquire);
  if (bytes == 0 || bytes > sizeof block->reason) return words;
  return text(words, " (", std::string_view(block->reason, bytes), ")");
}

void Liveness::raise_alarm(const std::string& during) const {
  if (health(rank_) != Health::kHealthy) refuse(rank_, during.c_str());
  const auto accepted = [&](Rank peer) {
    return accepted_[static_cast<std::size_t>(peer)].load(std::memory_order_relaxed);
  };
  Rank culprit = static_cast<Rank>(own_->first.load(std::memory_order_relaxed)) - 1;
  if (culprit >= 0 && accepted(culprit)) culprit = -1;
  std::string lost = culprit < 0 ? "" : in_words(culprit);
  int count = culprit < 0 ? 0 : 1;
  Rank last = culprit;
  for (Rank peer = 0; peer < size_; ++peer) {
    const Health state = health(peer);
    if (state == Health::kHealthy || state == Health::kClosed) continue;
    if (peer == culprit || accepted(peer)) continue;
    lost += text(count++ == 0 ? "" : ", ", in_words(peer));
    last = peer;
  }
  if (count == 0) return;
  const auto finder = own_->finder.load(std::memory_order_relaxed);
  throw Error(ErrorKind::kPeerLost,
              text(lost, ", noticed during ", during, " on rank ", rank_, " (reported by rank ",
                   static_cast<Rank>(finder) - 1, ")",
                   options_.survivable ? "; ctx.survivors() gives the group of those left" : ""),
              count == 1 ? last : culprit);
}

std::string Liveness::own_silence() const {
  const auto silence = std::max(longest_silence_.load(), Clock::now() - last_beat_.load());
  return text(", which saw no heartbeat of it for PGASDL_STOPPED_AFTER=", options_.stopped_after,
              " s (it once gave none for ", std::chrono::duration<double>(silence).count(), " s),");
}

void Liveness::refuse(Rank peer, const char* operation) const {
  const Health own = health(rank_);
  if (own == Health::kClosed || own == Health::kFailed) {
    throw Error(ErrorKind::kClosed,
                text("rank ", rank_,
                     "'s context is closed: its `with` block or process has ended, or "
                     "close() was called"));
  }
  if (peer == rank_ || own == Health::kStopped) {
    throw Error(
        ErrorKind::kPeerLost,
        text("this rank (", rank_, ") was declared ", name(own), " by the others",
             own == Health::kStopped ? own_silence() : "", " and is fenced off; it can only close"),
        rank_);
  }
  // A peer that left because of a loss that this rank has not noticed yet is not to blame.
  raise_alarm(operation);
  throw Error(ErrorKind::kPeerLost,
              text(operation, " to rank ", peer, ", which ",
                   health(peer) == Health::kClosed ? "has closed its context"
                                                   : std::string(name(health(peer)))),
              peer);
}

}  // namespace pgasdl

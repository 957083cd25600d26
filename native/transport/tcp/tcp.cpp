#include "transport/tcp/tcp.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>

#include "reduce/copy.hpp"
#include "sys/thread.hpp"
#include "transport/processor_atomic.hpp"
#include "transport/raise_flag.hpp"
#include "transport/token.hpp"

namespace pgasdl {
namespace {

constexpr int kEventsPerCall = 32;
// While waits poll, this transport's thread leaves connections to them: it looks from time to time
// whether they still do, which so many polls in that time show.
constexpr auto kLook = std::chrono::microseconds(500);
constexpr std::uint32_t kPolls = 8;
constexpr std::uint32_t kLatest = 4;  // polls, of which one looks at all connections
// After a peer has closed a connection, what it sent by others has this long to arrive.
constexpr auto kClosing = std::chrono::milliseconds(50);
constexpr auto kReconnect = std::chrono::milliseconds(100);

std::byte* own_data(const RemoteSegment& segment, std::uint64_t offset) {
  return segment.data + offset;
}

void notify(const UniqueFd& event) {
  if (event) eventfd_write(event.get(), 1);
}

void clear(const UniqueFd& event) {
  eventfd_t ignored;
  eventfd_read(event.get(), &ignored);
}

UniqueFd make_event() {
  UniqueFd made(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!made) throw_system("eventfd", errno);
  return made;
}

}  // namespace

TcpTransport::TcpTransport(Rank rank, Rank size, const std::string& token,
                           const TcpOptions& options)
    : rank_(rank),
      size_(size),
      options_(options),
      events_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(make_event()),
      news_(make_event()),
      queues_(options.queues),
      slots_(std::size_t{options.queues} * static_cast<std::size_t>(size)),
      peers_(static_cast<std::size_t>(size)),
      listener_{[this] {
                  if (WakeWord* sleeper = sleeper_.load(std::memory_order_acquire)) sleeper->wake();
                },
                [this](TcpRequests& requests) {
                  const std::lock_guard lock(mutex_);
                  closing_.push_back({&requests, Clock::now() + kClosing});
                  notify(wake_);
                },
                [this] {
                  has_ended_.store(true, std::memory_order_release);
                  notify(wake_);
                  notify(news_);
                  listener_.advanced();
                }},
      meeting_(rank, size, checked_token(token), options) {
  if (!events_) throw_system("epoll_create1", errno);
  register_wake_words();
  thread_ = thread_without_signals([this] { run(); });
}

TcpTransport::~TcpTransport() { end_service(); }

// The wake word goes with the world's segment, before this transport.
void TcpTransport::end_service() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_release);
  notify(wake_);
  thread_.join();
  for (const auto& stream : streams_) stream->end("this rank has left");
  sleeper_.store(nullptr, std::memory_order_release);
  retire_ended();
  meeting_.close();
  while (n_polling_.load(std::memory_order_acquire) != 0) std::this_thread::yield();
  events_.reset();
  const std::lock_guard lock(mutex_);
  wake_.reset();
  news_.reset();
}

std::string TcpTransport::endpoint() { return tcp_endpoint(meeting_.listener(), options_); }

void TcpTransport::connect(Rank peer, const std::string& endpoint) {
  peers_[static_cast<std::size_t>(peer)].addresses = tcp_addresses(peer, endpoint);
}

void TcpTransport::set_wake_word(Rank peer, WakeWord* wake_word) {
  if (peer == rank_) sleeper_.store(wake_word, std::memory_order_release);
}

std::string TcpTransport::publish(LocalSegment& segment, std::span<const Rank>) {
  return memories_->publish(segment);
}

RemoteSegment TcpTransport::attach(Rank peer, const std::string& description, int, Deadline) {
  return TcpMemories::attach(peer, description);
}

void TcpTransport::retract(const LocalSegment& segment) {
  const auto memory = memories_->retract(segment);
  if (memory == nullptr) return;
  const std::lock_guard lock(mutex_);
  for (TcpAnswers* answers : answers_) answers->abandon(memory);
}

bool TcpTransport::service() {
  clear(news_);
  return false;
}

TcpTransport::Slot& TcpTransport::slot(QueueId queue, Rank peer) const {
  if (queue >= queues_.size()) [[unlikely]] {
    throw Error(ErrorKind::kQueue,
                text("queue ", queue, ": this transport was made for ", queues_.size()));
  }
  return const_cast<Slot&>(slots_[std::size_t{queue} * static_cast<std::size_t>(size_) +
                                  static_cast<std::size_t>(peer)]);
}

TcpRequests* TcpTransport::to(QueueId queue, Rank peer) {
  Slot& there = slot(queue, peer);
  TcpRequests* const requests = there.requests.load(std::memory_order_acquire);
  if (requests != nullptr) [[likely]]
    return requests;
  if (const std::string* failure = there.failure.load(std::memory_order_acquire)) {
    throw Error(ErrorKind::kPeerLost, *failure, peer);
  }
  if (peers_[static_cast<std::size_t>(peer)].left.load(std::memory_order_acquire)) {
    throw Error(ErrorKind::kPeerLost, text("rank ", peer, " has closed its connections"), peer);
  }
  if (!there.wanted.exchange(true)) {
    const std::lock_guard lock(mutex_);
    if (TcpRequests* made = there.requests.load(std::memory_order_acquire)) {
      there.wanted.store(false);  // it was made meanwhile
      return made;
    }
    wanted_.emplace_back(queue, peer);
    notify(wake_);
  }
  return nullptr;
}

void TcpTransport::own_flag(FlagWord& word, std::uint32_t value, bool add) {
  raise_flag(word, value, add);
  listener_.advanced();
}

bool TcpTransport::post_write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                              const RemoteFlag* flag) {
  if (peer == rank_) [[unlikely]] {
    for (const Transfer& transfer : transfers) {
      pgasdl::copy(own_data(*transfer.remote, transfer.remote_offset),
                   transfer.local->data + transfer.local_offset, transfer.bytes);
    }
    if (flag != nullptr) {
      own_flag(flag->remote->board[flag->notification], flag->value, flag->add);
    }
    return true;
  }
  TcpRequests* const requests = to(queue, peer);
  return requests != nullptr && requests->write(transfers, flag);
}

bool TcpTransport::post_read(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                             const LocalFlag* flag) {
  if (peer == rank_) [[unlikely]] {
    for (const Transfer& transfer : transfers) {
      pgasdl::copy(transfer.local->data + transfer.local_offset,
                   own_data(*transfer.remote, transfer.remote_offset), transfer.bytes);
    }
    if (flag != nullptr) own_flag(flag->local->board[flag->notification], flag->value, false);
    return true;
  }
  TcpRequests* const requests = to(queue, peer);
  return requests != nullptr && requests->read(transfers, flag);
}

bool TcpTransport::post_atomic(QueueId queue, Rank peer, const Atomic& atomic) {
  if (peer == rank_) [[unlikely]] {
    processor_atomic(atomic, atomic.remote->data);
    return true;
  }
  TcpRequests* const requests = to(queue, peer);
  return requests != nullptr && requests->atomic(atomic);
}

bool TcpTransport::complete(QueueId queue) {
  slot(queue, 0);
  TcpQueue& all = queues_[queue];
  if (all.complete()) return true;
  const std::uint64_t posted = all.n_posted.load(std::memory_order_relaxed);
  if (all.n_asked.exchange(posted, std::memory_order_relaxed) != posted) {
    for (Rank peer = 0; peer < size_; ++peer) {
      TcpRequests* const requests = slot(queue, peer).requests.load(std::memory_order_acquire);
      if (requests != nullptr) requests->ask();
    }
  }
  return all.complete();
}

// The kernel has a copy of what has left, long before the peer acknowledges it.
bool TcpTransport::sent(QueueId queue) {
  slot(queue, 0);
  queues_[queue].faults.raise();
  bool all = true;
  for (Rank peer = 0; peer < size_; ++peer) {
    TcpRequests* const requests = slot(queue, peer).requests.load(std::memory_order_acquire);
    if (requests != nullptr) all &= requests->sent();
  }
  return all;
}

bool TcpTransport::lost_answers(QueueId queue, Rank peer) {
  TcpRequests* const requests = slot(queue, peer).requests.load(std::memory_order_acquire);
  return requests != nullptr && requests->lost_answers();
}

std::uint64_t TcpTransport::mark(QueueId queue, Rank peer) const {
  TcpRequests* const requests = slot(queue, peer).requests.load(std::memory_order_acquire);
  return requests == nullptr ? 0 : requests->mark();
}

bool TcpTransport::reached(QueueId queue, Rank peer, std::uint64_t mark) const {
  const TcpRequests* const requests = slot(queue, peer).requests.load(std::memory_order_acquire);
  return requests == nullptr || requests->reached(mark);
}

bool TcpTransport::connecting(QueueId queue, Rank peer) const {
  return peer != rank_ && slot(queue, peer).requests.load(std::memory_order_relaxed) == nullptr;
}

std::size_t TcpTransport::connections(QueueId queue) const {
  std::size_t open = 0;
  for (Rank peer = 0; peer < size_; ++peer) {
    const TcpRequests* const requests = slot(queue, peer).requests.load(std::memory_order_acquire);
    open += requests != nullptr && !requests->ended() ? 1 : 0;
  }
  return open;
}

std::optional<QueueId> TcpTransport::connected(QueueId queue, Rank peer) const {
  const auto carries = [&](QueueId each) {
    const TcpRequests* const requests = slot(each, peer).requests.load(std::memory_order_acquire);
    return requests != nullptr && !requests->ended();
  };
  if (carries(queue)) return queue;
  for (QueueId other = 0; other < queues_.size(); ++other) {
    if (carries(other)) return other;
  }
  return std::nullopt;
}

void TcpTransport::send_farewell(Rank peer, std::uint64_t word) {
  const std::lock_guard lock(mutex_);
  for (TcpAnswers* answers : answers_) {
    if (answers->peer() == peer && !answers->ended()) answers->say_farewell(word);
  }
}

std::uint64_t TcpTransport::farewell(Rank peer) const {
  for (QueueId queue = 0; queue < queues_.size(); ++queue) {
    const TcpRequests* const requests = slot(queue, peer).requests.load(std::memory_order_acquire);
    if (requests != nullptr && requests->farewell() != 0) return requests->farewell();
  }
  return 0;
}

// What was posted before still arrives, unless the peer takes nothing.
void TcpTransport::reconnect(Rank peer) {
  if (peer == rank_) return;
  peers_[static_cast<std::size_t>(peer)].left.store(false, std::memory_order_release);
  const auto until = Clock::now() + kReconnect;
  for (QueueId queue = 0; queue < queues_.size(); ++queue) {
    Slot& there = slot(queue, peer);
    TcpRequests* const requests = there.requests.load(std::memory_order_acquire);
    if (requests != nullptr) {
      const std::uint64_t mark = requests->mark();
      while (!requests->reached(mark) && Clock::now() < until) {
        advance();
        std::this_thread::yield();
      }
      there.requests.store(nullptr, std::memory_order_release);
      requests->drop("", true);
      queues_[queue].faults.drop(peer);
    }
    there.failure.store(nullptr, std::memory_order_release);
  }
}

void TcpTransport::lost(Rank peer) {
  for (QueueId queue = 0; queue < queues_.size(); ++queue) {
    TcpRequests* const requests = slot(queue, peer).requests.load(std::memory_order_acquire);
    if (requests != nullptr) requests->drop("the rank is lost", false);
  }
}

std::string TcpTransport::unreached(Rank peer) const {
  for (QueueId queue = 0; queue < queues_.size(); ++queue) {
    if (const auto* failure = slot(queue, peer).failure.load(std::memory_order_acquire)) {
      return *failure;
    }
  }
  return "";
}

bool TcpTransport::forget(Rank peer) {
  peers_[static_cast<std::size_t>(peer)].forgotten.store(true, std::memory_order_release);
  lost(peer);
  const std::lock_guard lock(mutex_);
  for (TcpAnswers* answers : answers_) {
    if (answers->peer() != peer) continue;
    answers->end("the rank is lost");
    answers->retire();  // and waits for who takes its requests now
  }
  return true;
}

void TcpTransport::take_over(QueueId queue) {
  for (Rank peer = 0; peer < size_; ++peer) {
    TcpRequests* const requests = slot(queue, peer).requests.load(std::memory_order_acquire);
    if (requests != nullptr) requests->take_over();
  }
}

// Most often the next bytes come where the latest came: to look there takes half as long.
void TcpTransport::progress() {
  const std::uint32_t polls = n_polls_.fetch_add(1, std::memory_order_relaxed);
  TcpStream* const latest = latest_.load(std::memory_order_acquire);
  if (latest == nullptr || polls % kLatest == 0) return advance();
  latest->receive();
}

void TcpTransport::advance() {
  n_polling_.fetch_add(1, std::memory_order_acq_rel);
  if (!stopping_.load(std::memory_order_acquire)) take_events();
  n_polling_.fetch_sub(1, std::memory_order_release);
}

void TcpTransport::take_events() {
  std::array<epoll_event, kEventsPerCall> events;
  const int n = epoll_wait(events_.get(), events.data(), kEventsPerCall, 0);
  for (int i = 0; i < n; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    auto& stream = *static_cast<TcpStream*>(event.data.ptr);
    if ((event.events & EPOLLOUT) != 0) stream.flush();
    if ((event.events & ~static_cast<std::uint32_t>(EPOLLOUT)) == 0) continue;
    latest_.store(&stream, std::memory_order_release);
    stream.receive();
  }
}

void TcpTransport::run() {
  pthread_setname_np(pthread_self(), "pgasdl-tcp");
  std::uint32_t seen = 0;
  const auto established = [this](TcpMeeting::Established made) { establish(std::move(made)); };
  const auto failed = [this](Rank peer, QueueId queue, const std::string& why) {
    fail(peer, queue, why);
  };
  while (!stopping_.load(std::memory_order_acquire)) {
    const std::uint32_t polls = n_polls_.load(std::memory_order_relaxed);
    const bool polled = polls - seen >= kPolls;
    seen = polls;
    auto until = meeting_.next();
    if (polled) until = std::min(until, Clock::now() + kLook);
    {
      const std::lock_guard lock(mutex_);
      for (const Closing& each : closing_) until = std::min(until, each.until);
    }
    std::array<pollfd, 3> watched{{{wake_.get(), POLLIN, 0},
                                   {meeting_.descriptor(), POLLIN, 0},
                                   {polled ? -1 : events_.get(), POLLIN, 0}}};
    timespec left{1, 0};  // a second
    if (until != Clock::time_point::max()) {
      const Nanoseconds wait = std::clamp<Nanoseconds>(until - Clock::now(), Nanoseconds(0),
                                                       std::chrono::seconds(1) - Nanoseconds(1));
      left = {0, wait.count()};
    }
    ppoll(watched.data(), watched.size(), &left, nullptr);
    if (watched[0].revents != 0) {
      clear(wake_);
      begin_wanted();
    }
    meeting_.advance(established, failed);
    if (watched[2].revents != 0) advance();
    end_closing();
    if (has_ended_.exchange(false)) retire_ended();
  }
}

void TcpTransport::begin_wanted() {
  std::vector<std::pair<QueueId, Rank>> wanted;
  {
    const std::lock_guard lock(mutex_);
    wanted.swap(wanted_);
  }
  for (const auto& [queue, peer] : wanted) {
    meeting_.connect(peer, queue, peers_[static_cast<std::size_t>(peer)].addresses);
  }
}

void TcpTransport::establish(TcpMeeting::Established made) {
  const std::lock_guard lock(mutex_);
  // With the mutex: forget() ends those that are listed.
  if (peers_[static_cast<std::size_t>(made.peer)].forgotten.load(std::memory_order_acquire)) return;
  if (made.here) {
    Slot& there = slot(made.queue, made.peer);
    auto requests =
        std::make_unique<TcpRequests>(std::move(made.socket), events_.get(), made.peer,
                                      queues_[made.queue], ++there.generation, listener_);
    requests->begin_events();
    there.requests.store(requests.get(), std::memory_order_release);
    there.wanted.store(false);
    streams_.push_back(std::move(requests));
  } else {
    // Nothing of a connection before arrives any more. Who takes requests wants no other lock.
    for (TcpAnswers* before : answers_) {
      if (before->peer() != made.peer || before->queue() != made.queue) continue;
      before->end("its rank connected anew");
      before->retire();
    }
    auto answers = std::make_unique<TcpAnswers>(std::move(made.socket), events_.get(), made.peer,
                                                made.queue, *memories_, sleeper_);
    answers->begin_events();
    answers_.push_back(answers.get());
    streams_.push_back(std::move(answers));
  }
}

void TcpTransport::fail(Rank peer, QueueId queue, const std::string& why) {
  const std::lock_guard lock(mutex_);
  failures_.push_back(text("no connection with rank ", peer, ": ", why));
  Slot& there = slot(queue, peer);
  there.failure.store(&failures_.back(), std::memory_order_release);
  there.wanted.store(false);
  notify(news_);
}

void TcpTransport::end_closing() {
  std::vector<TcpRequests*> due;
  {
    const std::lock_guard lock(mutex_);
    if (closing_.empty()) return;
    const auto now = Clock::now();
    std::erase_if(closing_, [&](const Closing& each) {
      if (each.until > now) return false;
      due.push_back(each.requests);
      return true;
    });
  }
  for (TcpRequests* requests : due) {
    peers_[static_cast<std::size_t>(requests->peer())].left.store(true, std::memory_order_release);
    requests->end("the peer closed it");
  }
}

// Without the mutex: who receives, and is waited for here, may want it.
void TcpTransport::retire_ended() {
  std::vector<TcpStream*> ended;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& stream : streams_) {
      if (stream->ended()) ended.push_back(stream.get());
    }
  }
  for (TcpStream* stream : ended) stream->retire();
}

}  // namespace pgasdl

#pragma once

// MPI for ranks that are threads of this process, so that a test can hold one of them at a chosen
// point. All data travel as messages and through windows; no window is mapped unless a test asks
// for it.

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "transport/mpi/mpi.hpp"

namespace pgasdl::testing {

// State that all ranks share.
struct MpiMachine {
  using Bytes = std::vector<std::byte>;
  struct Message {
    int from;
    Bytes bytes;
  };
  // A message with the data tag: it leaves its source when the receiver takes it.
  struct Long {
    const std::byte* source;
    std::size_t bytes;
    bool taken = false;
  };
  // One collective call: MPI requires the same calls of all members, in the same order.
  struct Round {
    std::string call;
    std::size_t arrived = 0;
    std::vector<std::uint64_t> values;
  };
  struct Window {
    std::vector<std::uint64_t> bases;
    std::size_t freed = 0;
  };

  explicit MpiMachine(int size) : messages(static_cast<std::size_t>(size)) {
    communicators.emplace_back();
    communicators.emplace_back();  // 1: all ranks
    for (int rank = 0; rank < size; ++rank) communicators[1].push_back(rank);
  }

  template <typename Until>
  void wait(std::unique_lock<std::mutex>& lock, const char* what, Until&& until) {
    CHECK_NOTE(changed.wait_for(lock, std::chrono::seconds(60), until), "%s", what);
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::deque<Message>> messages;                               // by receiver
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Long>>> longs;  // by sender, receiver
  std::vector<std::vector<int>> communicators;
  std::map<std::pair<std::uint64_t, std::size_t>, Round> rounds;
  std::map<std::uint64_t, Window> windows;
  std::uint64_t next_window = 1;
  bool maps = false;            // maps windows that MPI allocates
  std::map<int, int> n_probes;  // by rank
  // Called without the mutex: `made` by a rank before it returns from the last collective call
  // that makes a window, `taken` by a rank that has taken a message.
  std::function<void(int)> made = [](int) {};
  std::function<void(int, const MpiHeader&)> taken = [](int, const MpiHeader&) {};
  // With the mutex: whether a rank may receive long data now.
  std::function<bool(int)> lets = [](int) { return true; };
};

class MpiThread final : public MpiLibrary {
 public:
  MpiThread(std::shared_ptr<MpiMachine> machine, int rank)
      : MpiLibrary(Constants{}), machine_(std::move(machine)), rank_(rank) {}

  int rput(const void* from, int bytes, int target, Aint at, Handle window,
           Handle* request) override {
    std::memcpy(place(window, target, at), from, static_cast<std::size_t>(bytes));
    *request = 0;
    return 0;
  }
  int rget(void* to, int bytes, int target, Aint at, Handle window, Handle* request) override {
    std::memcpy(to, place(window, target, at), static_cast<std::size_t>(bytes));
    *request = 0;
    return 0;
  }
  int fetch_add(const std::uint64_t* operand, std::uint64_t* old, int target, Aint at,
                Handle window) override {
    *old = word(window, target, at).fetch_add(*operand);
    return 0;
  }
  int compare_swap(const std::uint64_t* swap, const std::uint64_t* compare, std::uint64_t* old,
                   int target, Aint at, Handle window) override {
    *old = *compare;
    word(window, target, at).compare_exchange_strong(*old, *swap);
    return 0;
  }
  int flush(int, Handle) override { return 0; }
  int test(Handle* request, bool* done) override {
    const std::lock_guard lock(machine_->mutex);
    if (*request == 0) {
      *done = true;
    } else if (const auto sent = sent_.find(*request); sent != sent_.end()) {
      *done = sent->second->taken;
    } else if (const auto wanted = wanted_.find(*request); wanted != wanted_.end()) {
      take(wanted->second.peer);
      *done = wanted->second.done;
    } else {
      *done = over(begun_.at(*request));
    }
    if (*done) *request = 0;
    return 0;
  }
  int irecv(void* to, int bytes, int peer, int, Handle, Handle* request) override {
    const std::lock_guard lock(machine_->mutex);
    *request = ++n_messages_;
    wanted_[*request] = {static_cast<std::byte*>(to), static_cast<std::size_t>(bytes), peer};
    return 0;
  }
  int isend(const void* from, int bytes, int peer, int tag, Handle, Handle* request) override {
    const auto* begin = static_cast<const std::byte*>(from);
    const std::lock_guard lock(machine_->mutex);
    if (tag != 0) {
      *request = ++n_messages_;
      sent_[*request] = std::make_shared<MpiMachine::Long>(begin, static_cast<std::size_t>(bytes));
      machine_->longs[{rank_, peer}].push_back(sent_[*request]);
      return 0;
    }
    machine_->messages.at(static_cast<std::size_t>(peer))
        .push_back({rank_, {begin, begin + bytes}});
    machine_->changed.notify_all();
    *request = 0;
    return 0;
  }
  int probe(int, Handle, bool* there, Handle* message, int* source) override {
    const std::lock_guard lock(machine_->mutex);
    ++machine_->n_probes[rank_];
    auto& mine = machine_->messages.at(static_cast<std::size_t>(rank_));
    *there = !mine.empty();
    if (!*there) return 0;
    *source = mine.front().from;
    *message = ++n_messages_;
    probed_[*message] = std::move(mine.front().bytes);
    mine.pop_front();
    return 0;
  }
  int receive(void* to, int bytes, Handle* message, Handle* request) override {
    MpiMachine::Bytes content;
    {
      const std::lock_guard lock(machine_->mutex);
      content = std::move(probed_.at(*message));
      probed_.erase(*message);
    }
    CHECK(content.size() <= static_cast<std::size_t>(bytes) && content.size() >= sizeof(MpiHeader));
    std::memcpy(to, content.data(), content.size());
    *request = 0;
    machine_->taken(rank_, *static_cast<const MpiHeader*>(to));
    return 0;
  }

  int allocate(std::uint64_t bytes, bool, Handle communicator, void** base,
               Handle* window) override {
    memory_.push_back(std::make_unique<std::byte[]>(bytes + 1));
    *base = memory_.back().get();
    return create(*base, bytes, communicator, window);
  }
  int create(void* base, std::uint64_t, Handle communicator, Handle* window) override {
    std::uint64_t proposed = 0;
    {
      const std::lock_guard lock(machine_->mutex);
      proposed = machine_->next_window++;
    }
    const auto names = all("create", communicator, proposed);
    const auto bases = all("create", communicator, reinterpret_cast<std::uint64_t>(base));
    const std::lock_guard lock(machine_->mutex);
    machine_->windows[names[0]].bases = bases;
    *window = names[0];
    return 0;
  }
  int open(Handle) override { return 0; }
  int unified(Handle, bool* yes) override {
    *yes = true;
    return 0;
  }
  int close_and_free(Handle* window) override {
    std::unique_lock lock(machine_->mutex);
    MpiMachine::Window& freed = machine_->windows.at(*window);
    ++freed.freed;
    machine_->changed.notify_all();
    machine_->wait(lock, "not all free a window",
                   [&] { return freed.freed == freed.bases.size(); });
    return 0;
  }
  std::byte* mapped(Handle window, int target) override {
    return machine_->maps ? place(window, target, 0) : nullptr;
  }
  int ibarrier(Handle communicator, Handle* request) override {
    const std::lock_guard lock(machine_->mutex);
    *request = ++n_messages_;
    begun_[*request] = arrive("ibarrier", communicator, 0);
    return 0;
  }
  int allgather(std::uint64_t mine, std::uint64_t* values, Handle communicator) override {
    const auto found = all("allgather", communicator, mine);
    std::memcpy(values, found.data(), found.size() * sizeof found[0]);
    machine_->made(rank_);
    return 0;
  }
  int subset(Handle, const int* ranks, int count, int, Handle* made) override {
    const std::vector<int> members(ranks, ranks + count);
    const std::lock_guard lock(machine_->mutex);
    auto& known = machine_->communicators;
    const auto found = std::find(known.begin() + 2, known.end(), members);
    *made = static_cast<Handle>(found - known.begin());
    if (found == known.end()) known.push_back(members);
    return 0;
  }

 protected:
  std::string words(int code) const override { return text("error ", code); }

 private:
  using Key = std::pair<std::uint64_t, std::size_t>;

  struct Wanted {
    std::byte* to;
    std::size_t bytes;
    int peer;
    bool done = false;
  };
  // Messages from a peer match receives in the same order. With the mutex.
  void take(int peer) {
    auto& sent = machine_->longs[{peer, rank_}];
    for (auto& [request, wanted] : wanted_) {
      if (wanted.done || wanted.peer != peer) continue;
      if (sent.empty() || !machine_->lets(rank_)) return;
      MpiMachine::Long& message = *sent.front();
      CHECK(message.bytes == wanted.bytes);
      std::memcpy(wanted.to, message.source, message.bytes);
      message.taken = wanted.done = true;
      sent.pop_front();
    }
  }

  // Requires that the caller holds the mutex.
  Key arrive(const char* call, Handle communicator, std::uint64_t value) {
    const auto& members = machine_->communicators.at(communicator);
    const Key key{communicator, calls_[communicator]++};
    MpiMachine::Round& round = machine_->rounds[key];
    if (round.arrived == 0) round.call = call;
    CHECK_NOTE(round.call == call, "rank %d is in %s, others in %s", rank_, call,
               round.call.c_str());
    round.values.resize(members.size());
    const auto at = std::find(members.begin(), members.end(), rank_) - members.begin();
    round.values.at(static_cast<std::size_t>(at)) = value;
    ++round.arrived;
    machine_->changed.notify_all();
    return key;
  }
  bool over(const Key& key) const {
    return machine_->rounds.at(key).arrived == machine_->communicators.at(key.first).size();
  }
  std::vector<std::uint64_t> all(const char* call, Handle communicator, std::uint64_t mine) {
    std::unique_lock lock(machine_->mutex);
    const Key key = arrive(call, communicator, mine);
    machine_->wait(lock, call, [&] { return over(key); });
    return machine_->rounds.at(key).values;
  }
  std::byte* place(Handle window, int target, Aint at) {
    const std::lock_guard lock(machine_->mutex);
    const auto base = machine_->windows.at(window).bases.at(static_cast<std::size_t>(target));
    return reinterpret_cast<std::byte*>(base) + at;
  }
  std::atomic_ref<std::uint64_t> word(Handle window, int target, Aint at) {
    return std::atomic_ref(*reinterpret_cast<std::uint64_t*>(place(window, target, at)));
  }

  const std::shared_ptr<MpiMachine> machine_;
  const int rank_;
  Handle n_messages_ = 0;
  std::map<Handle, MpiMachine::Bytes> probed_;
  std::map<Handle, Key> begun_;
  std::map<Handle, std::shared_ptr<MpiMachine::Long>> sent_;
  std::map<Handle, Wanted> wanted_;
  std::map<Handle, std::size_t> calls_;  // collective calls of this rank, by communicator
  std::vector<std::unique_ptr<std::byte[]>> memory_;
};

}  // namespace pgasdl::testing

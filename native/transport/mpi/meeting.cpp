// Messages beside MPI's RMA: flags, questions, and which members are there to make a window.
#include <algorithm>
#include <cstring>

#include "transport/mpi/window_group.hpp"
#include "transport/raise_flag.hpp"

namespace pgasdl {
namespace {

// Holds for the library's own messages; any other on this communicator must harm no memory.
bool inside(const MpiHeader& header, std::uint64_t bytes) {
  const std::uint64_t most = MpiChannel::apart(header) ? bytes : MpiChannel::kMostBytes;
  return header.kind == MpiHeader::Kind::kWrite && header.bytes <= most && header.bytes <= bytes &&
         header.offset <= bytes - header.bytes;
}

}  // namespace

bool MpiWorld::send(Rank peer, const MpiHeader& header, const std::byte* bytes, Handle* request) {
  const std::lock_guard lock(channel_mutex_);
  return channel_.send(peer, header, bytes, request);
}

bool MpiWorld::answered(QueueId queue, Rank peer, std::uint64_t& question) {
  const std::lock_guard lock(channel_mutex_);
  if (question == 0) {
    MpiHeader header{};
    header.kind = MpiHeader::Kind::kAsk;
    header.question = questions_ + 1;
    header.queue = queue;
    if (!channel_.send(peer, header, nullptr)) return false;
    question = ++questions_;
  }
  return answers_[peer] >= question;
}

bool MpiWorld::receive() {
  const std::unique_lock mine(channel_mutex_, std::try_to_lock);
  if (!mine.owns_lock()) return false;  // another thread receives
  send_unsent();
  const MpiHeader* header = channel_.receive();
  if (header == nullptr) return false;
  const Rank sender = channel_.sender();
  switch (header->kind) {
    case MpiHeader::Kind::kWrite:
      deliver(*header);
      break;
    case MpiHeader::Kind::kAsk:
      unsent_.emplace_back(
          sender, MpiHeader{.kind = MpiHeader::Kind::kAnswer, .question = header->question});
      break;
    case MpiHeader::Kind::kAnswer:
      answers_[sender] = header->question;
      break;
    default:
      hear(*header, sender);
  }
  return true;
}

bool MpiWorld::receiving() const {
  const std::lock_guard lock(channel_mutex_);
  return channel_.receiving();
}

void MpiWorld::send_unsent() {
  std::set<Rank> full;  // their messages keep their order
  std::erase_if(unsent_, [&](const auto& unsent) {
    const auto& [peer, header] = unsent;
    if (full.contains(peer)) return false;
    try {
      if (channel_.send(peer, header, nullptr)) return true;
    } catch (const Error&) {
      return true;  // the peer is lost
    }
    full.insert(peer);
    return false;
  });
}

MpiPlace MpiWorld::place_of(const MpiHeader& header) const {
  const std::lock_guard lock(mutex_);
  const auto data = named_.find(header.data);
  if (data == named_.end() || !inside(header, data->second->own_bytes)) return {};
  auto window = data->second->weak_from_this().lock();
  if (window == nullptr) return {};  // being destroyed
  return {window->own + header.offset, std::move(window)};
}

void MpiWorld::deliver(const MpiHeader& header) {
  const std::lock_guard lock(mutex_);
  // A window without a name is gone, and its memory is no longer used (give_name).
  const auto data = named_.find(header.data);
  if (header.bytes > 0 && data != named_.end()) {
    if (!inside(header, data->second->own_bytes)) return;
    if (!MpiChannel::apart(header)) {
      std::memcpy(data->second->own + header.offset, channel_.bytes(), header.bytes);
    }
  }
  const auto board = named_.find(header.board);
  if (board != named_.end() && header.notification < board->second->own_notifications) {
    FlagWord& flag = board->second->own_board[header.notification];
    raise_flag(flag, header.value, header.add == 1);
  }
}

// --- meetings: MPI makes a window only if every member calls it, and no member can leave that
// call. So members announce to the first one when they come and when they leave; it opens the
// meeting when all are there at once. A member leaves only once it knows that the first one does
// not count on it.

void MpiWorld::hear(const MpiHeader& header, Rank sender) {
  const MpiWindowName& name = header.board;
  if (header.kind == MpiHeader::Kind::kCome) {
    Meeting& meeting = meetings_[name];
    meeting.came.insert(sender);
    open(name, meeting);
    return;
  }
  const auto found = meetings_.find(name);
  if (header.kind == MpiHeader::Kind::kLeave) {
    if (found != meetings_.end()) {
      if (found->second.number != 0) return;  // too late, as the sender will hear
      found->second.came.erase(sender);
    }
    announce(sender, MpiHeader::Kind::kLeft, name, 0);
  } else if (found != meetings_.end()) {
    if (header.kind == MpiHeader::Kind::kGo) found->second.number = header.question;
    if (header.kind == MpiHeader::Kind::kLeft) found->second.left = true;
  }
}

void MpiWorld::announce(Rank peer, MpiHeader::Kind kind, const MpiWindowName& meeting,
                        std::uint64_t number) {
  unsent_.emplace_back(peer, MpiHeader{.kind = kind, .question = number, .board = meeting});
}

void MpiWorld::open(const MpiWindowName& name, Meeting& meeting) {
  const auto came = [&](Rank peer) {
    return meeting.came.contains(peer) && !gone_[static_cast<std::size_t>(peer)].load();
  };
  if (!meeting.here || meeting.number != 0 || !std::ranges::all_of(meeting.expected, came)) return;
  meeting.number = ++n_opened_[name.group];
  for (const Rank peer : meeting.expected)
    announce(peer, MpiHeader::Kind::kGo, name, meeting.number);
}

// Receives messages until the meeting satisfies `until`; false: not by the deadline.
template <typename Until>
bool MpiWorld::listen(const MpiWindowName& name, Until&& until, Deadline deadline,
                      const std::function<void()>& help) {
  for (;;) {
    {
      std::unique_lock<std::mutex> serial;
      while (try_serialize(serial) && receive()) {
      }
    }
    {
      const std::lock_guard lock(channel_mutex_);
      // First send this rank's messages about the meeting: the MPI calls that follow send none.
      const bool said = std::ranges::none_of(
          unsent_, [&](const auto& unsent) { return unsent.second.board == name; });
      if (said && until(meetings_.at(name))) return true;
    }
    if (deadline.passed()) return false;
    help();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

std::uint64_t MpiWorld::meet(const MpiWindow& window, Deadline deadline,
                             const std::function<void()>& help) {
  const MpiWindowName name = window.pending->meeting(*window.group);
  const std::vector<Rank>& members = window.ranks();
  {
    const std::lock_guard lock(channel_mutex_);
    Meeting& meeting = meetings_[name];
    if (!meeting.here) {
      meeting.here = true;
      meeting.left = false;
      if (members.front() == rank_) {
        meeting.expected.assign(members.begin() + 1, members.end());
        open(name, meeting);
      } else {
        announce(members.front(), MpiHeader::Kind::kCome, name, 0);
      }
    }
  }
  const auto opened = [](const Meeting& meeting) { return meeting.number != 0; };
  if (!listen(name, opened, deadline, help)) return 0;
  const std::lock_guard lock(channel_mutex_);
  return meetings_.extract(name).mapped().number;
}

// Leaves the meeting; returns its number if it was opened before this rank could leave.
std::uint64_t MpiWorld::part(const MpiWindow& window, const std::function<void()>& help) {
  const MpiWindowName name = window.pending->meeting(*window.group);
  const Rank first = window.ranks().front();
  {
    const std::lock_guard lock(channel_mutex_);
    const auto found = meetings_.find(name);
    if (found == meetings_.end() || !found->second.here) return 0;
    Meeting& meeting = found->second;
    if (first == rank_) {
      meeting.left = true;
      meeting.here = meeting.number != 0;
    } else if (meeting.number == 0) {
      announce(first, MpiHeader::Kind::kLeave, name, 0);
    }
  }
  const auto known = [](const Meeting& meeting) { return meeting.number != 0 || meeting.left; };
  (void)listen(name, known, Deadline::in(kPatience), help);
  const std::lock_guard lock(channel_mutex_);
  Meeting& meeting = meetings_.at(name);
  meeting.here = false;
  const std::uint64_t number = meeting.number;
  if (number != 0) meetings_.erase(name);
  return number;
}

// Waits at the end until all ranks are about to make their collective calls, or the deadline.
void MpiWorld::meet_all(Deadline deadline, const std::function<void()>& help) {
  MpiLibrary::Handle request = kNoHandle;
  {
    const auto lock = serialize();
    library_->check(library_->ibarrier(communicator_, &request), "MPI_Ibarrier", -1);
  }
  for (;;) {
    bool done = false;
    {
      const auto lock = serialize();
      library_->check(library_->test(&request, &done), "MPI_Ibarrier", -1);
    }
    if (done) return;
    if (deadline.passed()) {
      throw Error(ErrorKind::kSystem, text("rank ", rank_, ": not all ranks end in time"));
    }
    help();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace pgasdl

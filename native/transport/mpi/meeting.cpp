// What ranks tell each other beside MPI's own ways: flags, questions, and who is there when a
// window is to be made.
#include <algorithm>
#include <cstring>

#include "transport/mpi/circle.hpp"

namespace pgasdl {
namespace {

// No letter of ours is otherwise; whatever else comes by this communicator harms no memory.
bool inside(const MpiLetter& letter, std::uint64_t bytes) {
  return letter.kind == MpiLetter::Kind::kFlag && letter.bytes <= MpiMail::kMostBytes &&
         letter.bytes <= bytes && letter.offset <= bytes - letter.bytes;
}

}  // namespace

bool MpiWorld::send(Rank peer, const MpiLetter& letter, const std::byte* bytes) {
  const std::lock_guard lock(mail_mutex_);
  return mail_.send(peer, letter, bytes);
}

bool MpiWorld::answered(Rank peer, std::uint64_t& question) {
  const std::lock_guard lock(mail_mutex_);
  if (question == 0) {
    MpiLetter letter{};
    letter.kind = MpiLetter::Kind::kAsk;
    letter.question = questions_ + 1;
    if (!mail_.send(peer, letter, nullptr)) return false;
    question = ++questions_;
  }
  return answers_[peer] >= question;
}

bool MpiWorld::receive() {
  const std::unique_lock mine(mail_mutex_, std::try_to_lock);
  if (!mine.owns_lock()) return false;  // another thread is at it
  send_unsent();
  const MpiLetter* letter = mail_.receive();
  if (letter == nullptr) return false;
  const Rank sender = mail_.sender();
  switch (letter->kind) {
    case MpiLetter::Kind::kFlag:
      deliver(*letter);
      break;
    case MpiLetter::Kind::kAsk:
      unsent_.emplace_back(
          sender, MpiLetter{.kind = MpiLetter::Kind::kAnswer, .question = letter->question});
      break;
    case MpiLetter::Kind::kAnswer:
      answers_[sender] = letter->question;
      break;
    default:
      hear(*letter, sender);
  }
  return true;
}

void MpiWorld::send_unsent() {
  std::set<Rank> full;  // what is for them keeps its order
  std::erase_if(unsent_, [&](const auto& unsent) {
    const auto& [peer, letter] = unsent;
    if (full.contains(peer)) return false;
    try {
      if (mail_.send(peer, letter, nullptr)) return true;
    } catch (const Error&) {
      return true;  // of a peer that is lost
    }
    full.insert(peer);
    return false;
  });
}

void MpiWorld::deliver(const MpiLetter& letter) {
  const std::lock_guard lock(mutex_);
  // A window without a name is not there any more, and nobody looks at its memory (give_name).
  const auto data = named_.find(letter.data);
  if (letter.bytes > 0 && data != named_.end()) {
    if (!inside(letter, data->second->own_bytes)) return;
    std::memcpy(data->second->own + letter.offset, mail_.bytes(), letter.bytes);
  }
  const auto board = named_.find(letter.board);
  if (board != named_.end() && letter.notification < board->second->own_notifications) {
    FlagWord& flag = board->second->own_board[letter.notification];
    flag.store(letter.value, std::memory_order_release);
  }
}

// --- meetings: MPI makes windows only where everybody calls it, and lets nobody go before. So the
// members tell their first that they come and that they leave; it opens the meeting when all are
// there at once. Nobody leaves before it knows that the first one does not count on it.

void MpiWorld::hear(const MpiLetter& letter, Rank sender) {
  const MpiWindowName& name = letter.board;
  if (letter.kind == MpiLetter::Kind::kCome) {
    Meeting& meeting = meetings_[name];
    meeting.came.insert(sender);
    open(name, meeting);
    return;
  }
  const auto found = meetings_.find(name);
  if (letter.kind == MpiLetter::Kind::kLeave) {
    if (found != meetings_.end()) {
      if (found->second.number != 0) return;  // too late, as it will hear
      found->second.came.erase(sender);
    }
    tell(sender, MpiLetter::Kind::kLeft, name, 0);
  } else if (found != meetings_.end()) {
    if (letter.kind == MpiLetter::Kind::kGo) found->second.number = letter.question;
    if (letter.kind == MpiLetter::Kind::kLeft) found->second.left = true;
  }
}

void MpiWorld::tell(Rank peer, MpiLetter::Kind kind, const MpiWindowName& meeting,
                    std::uint64_t number) {
  unsent_.emplace_back(peer, MpiLetter{.kind = kind, .question = number, .board = meeting});
}

void MpiWorld::open(const MpiWindowName& name, Meeting& meeting) {
  const auto came = [&](Rank peer) {
    return meeting.came.contains(peer) && !gone_[static_cast<std::size_t>(peer)].load();
  };
  if (!meeting.here || meeting.number != 0 || !std::ranges::all_of(meeting.expected, came)) return;
  meeting.number = ++n_opened_[name.circle];
  for (const Rank peer : meeting.expected) tell(peer, MpiLetter::Kind::kGo, name, meeting.number);
}

// Hears what comes until the meeting is so; false: not by the deadline.
template <typename Until>
bool MpiWorld::listen(const MpiWindowName& name, Until&& until, Deadline deadline,
                      const std::function<void()>& help) {
  for (;;) {
    {
      std::unique_lock<std::mutex> turn;
      while (try_turn(turn) && receive()) {
      }
    }
    {
      const std::lock_guard lock(mail_mutex_);
      // What this rank has to say about it was sent: MPI's calls, which follow, send nothing.
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
  const MpiWindowName name = window.pending->meeting(*window.circle);
  const std::vector<Rank>& members = window.ranks();
  {
    const std::lock_guard lock(mail_mutex_);
    Meeting& meeting = meetings_[name];
    if (!meeting.here) {
      meeting.here = true;
      meeting.left = false;
      if (members.front() == rank_) {
        meeting.expected.assign(members.begin() + 1, members.end());
        open(name, meeting);
      } else {
        tell(members.front(), MpiLetter::Kind::kCome, name, 0);
      }
    }
  }
  const auto opened = [](const Meeting& meeting) { return meeting.number != 0; };
  if (!listen(name, opened, deadline, help)) return 0;
  const std::lock_guard lock(mail_mutex_);
  return meetings_.extract(name).mapped().number;
}

// The same where all were there before this rank could leave.
std::uint64_t MpiWorld::part(const MpiWindow& window, const std::function<void()>& help) {
  const MpiWindowName name = window.pending->meeting(*window.circle);
  const Rank first = window.ranks().front();
  {
    const std::lock_guard lock(mail_mutex_);
    const auto found = meetings_.find(name);
    if (found == meetings_.end() || !found->second.here) return 0;
    Meeting& meeting = found->second;
    if (first == rank_) {
      meeting.left = true;
      meeting.here = meeting.number != 0;
    } else if (meeting.number == 0) {
      tell(first, MpiLetter::Kind::kLeave, name, 0);
    }
  }
  const auto known = [](const Meeting& meeting) { return meeting.number != 0 || meeting.left; };
  (void)listen(name, known, Deadline::in(kPatience), help);
  const std::lock_guard lock(mail_mutex_);
  Meeting& meeting = meetings_.at(name);
  meeting.here = false;
  const std::uint64_t number = meeting.number;
  if (number != 0) meetings_.erase(name);
  return number;
}

// Everybody is on the way to what all must call at once, at the end; whoever is not, by the
// deadline, ends it for us.
void MpiWorld::meet_all(Deadline deadline, const std::function<void()>& help) {
  MpiLibrary::Handle request = kNoHandle;
  {
    const auto lock = turn();
    library_->check(library_->ibarrier(communicator_, &request), "MPI_Ibarrier", -1);
  }
  for (;;) {
    bool done = false;
    {
      const auto lock = turn();
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

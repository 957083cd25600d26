#include "transport/mpi_mail.hpp"

#include <cstring>
#include <utility>

namespace pgasdl {

// Of what went to, or came from, a peer that is lost nobody needs to hear here: liveness tells.

void MpiMail::reap() {
  for (std::size_t at = 0; at < under_way_.size();) {
    bool sent = false;
    if (library_.test(&under_way_[at]->request, &sent) == 0 && !sent) {
      ++at;
      continue;
    }
    spare_.push_back(std::move(under_way_[at]));
    std::swap(under_way_[at], under_way_.back());
    under_way_.pop_back();
  }
}

bool MpiMail::send(int peer, const MpiLetter& letter, const std::byte* bytes) {
  reap();
  if (under_way_.size() == kMostUnderWay) return false;
  if (spare_.empty()) spare_.push_back(std::make_unique<Sheet>());
  Sheet& sheet = *spare_.back();
  sheet.letter = letter;
  if (letter.bytes > 0) std::memcpy(sheet.bytes, bytes, letter.bytes);
  library_.check(library_.isend(&sheet.letter, static_cast<int>(sizeof letter + letter.bytes), peer,
                                communicator_, &sheet.request),
                 "MPI_Isend", peer);
  under_way_.push_back(std::move(spare_.back()));
  spare_.pop_back();
  return true;
}

const MpiLetter* MpiMail::receive() {
  reap();
  if (!arriving_) {
    bool there = false;
    MpiLibrary::Handle message = 0;
    if (library_.probe(communicator_, &there, &message) != 0 || !there) return nullptr;
    constexpr int kMost = sizeof(MpiLetter) + kMostBytes;
    if (library_.receive(&arrival_.letter, kMost, &message, &arrival_.request) != 0) return nullptr;
  }
  bool done = false;
  const bool well = library_.test(&arrival_.request, &done) == 0;
  arriving_ = well && !done;
  return well && done ? &arrival_.letter : nullptr;
}

}  // namespace pgasdl

#include "transport/mpi/mail.hpp"

#include <algorithm>
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

std::unique_ptr<MpiMail::Sheet> MpiMail::take_spare() {
  if (spare_.empty()) return std::make_unique<Sheet>();
  auto sheet = std::move(spare_.back());
  spare_.pop_back();
  return sheet;
}

bool MpiMail::send(int peer, const MpiLetter& letter, const std::byte* bytes) {
  reap();
  const auto there = std::count_if(under_way_.begin(), under_way_.end(),
                                   [&](const auto& sheet) { return sheet->peer == peer; });
  if (there >= kMostUnderWay) return false;
  auto sheet = take_spare();
  sheet->peer = peer;
  sheet->letter = letter;
  if (letter.bytes > 0) std::memcpy(sheet->bytes, bytes, letter.bytes);
  library_.check(library_.isend(&sheet->letter, static_cast<int>(sizeof letter + letter.bytes),
                                peer, communicator_, &sheet->request),
                 "MPI_Isend", peer);
  under_way_.push_back(std::move(sheet));
  return true;
}

const MpiLetter* MpiMail::receive() {
  reap();
  if (read_ != nullptr) spare_.push_back(std::move(read_));
  bool there = false;
  MpiLibrary::Handle message = 0;
  int source = 0;
  if (library_.probe(communicator_, &there, &message, &source) == 0 && there) {
    auto sheet = take_spare();
    sheet->peer = source;
    constexpr int kMost = sizeof(MpiLetter) + kMostBytes;
    const int code = library_.receive(&sheet->letter, kMost, &message, &sheet->request);
    (code == 0 ? arriving_ : spare_).push_back(std::move(sheet));
  }
  for (auto at = arriving_.begin(); at != arriving_.end(); ++at) {
    // A sender that stops in the middle of one keeps back its own only.
    const bool waits = std::any_of(
        arriving_.begin(), at, [&](const auto& earlier) { return earlier->peer == (*at)->peer; });
    bool done = false;
    const bool well = waits || library_.test(&(*at)->request, &done) == 0;
    if (well && !done) continue;
    auto sheet = std::move(*at);
    arriving_.erase(at);
    if (!well) {
      spare_.push_back(std::move(sheet));
      return nullptr;
    }
    read_ = std::move(sheet);
    return &read_->letter;
  }
  return nullptr;
}

}  // namespace pgasdl

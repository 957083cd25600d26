#include "transport/mpi/eager_channel.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace pgasdl {

// Of what went to, or came from, a peer that is lost nobody needs to hear here: liveness tells.

void MpiEagerChannel::reap() {
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

std::unique_ptr<MpiEagerChannel::Buffer> MpiEagerChannel::take_spare() {
  if (spare_.empty()) return std::make_unique<Buffer>();
  auto buffer = std::move(spare_.back());
  spare_.pop_back();
  return buffer;
}

bool MpiEagerChannel::send(int peer, const MpiHeader& header, const std::byte* bytes) {
  reap();
  const auto there = std::count_if(under_way_.begin(), under_way_.end(),
                                   [&](const auto& buffer) { return buffer->peer == peer; });
  if (there >= kMostUnderWay) return false;
  auto buffer = take_spare();
  buffer->peer = peer;
  buffer->header = header;
  if (header.bytes > 0) std::memcpy(buffer->bytes, bytes, header.bytes);
  library_.check(library_.isend(&buffer->header, static_cast<int>(sizeof header + header.bytes),
                                peer, communicator_, &buffer->request),
                 "MPI_Isend", peer);
  under_way_.push_back(std::move(buffer));
  return true;
}

const MpiHeader* MpiEagerChannel::receive() {
  reap();
  if (read_ != nullptr) spare_.push_back(std::move(read_));
  bool there = false;
  MpiLibrary::Handle message = 0;
  int source = 0;
  if (library_.probe(communicator_, &there, &message, &source) == 0 && there) {
    auto buffer = take_spare();
    buffer->peer = source;
    constexpr int kMost = sizeof(MpiHeader) + kMostBytes;
    const int code = library_.receive(&buffer->header, kMost, &message, &buffer->request);
    (code == 0 ? arriving_ : spare_).push_back(std::move(buffer));
  }
  for (auto at = arriving_.begin(); at != arriving_.end(); ++at) {
    // A sender that stops in the middle of one keeps back its own only.
    const bool waits = std::any_of(
        arriving_.begin(), at, [&](const auto& earlier) { return earlier->peer == (*at)->peer; });
    bool done = false;
    const bool well = waits || library_.test(&(*at)->request, &done) == 0;
    if (well && !done) continue;
    auto buffer = std::move(*at);
    arriving_.erase(at);
    if (!well) {
      spare_.push_back(std::move(buffer));
      return nullptr;
    }
    read_ = std::move(buffer);
    return &read_->header;
  }
  return nullptr;
}

}  // namespace pgasdl

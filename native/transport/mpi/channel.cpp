#include "transport/mpi/channel.hpp"

#include <algorithm>
#include <cstring>

namespace pgasdl {
namespace {

constexpr int kHeaderTag = 0;
constexpr int kDataTag = 1;

}  // namespace

// Errors of messages to or from a lost peer are ignored here: liveness reports the loss.

void MpiChannel::reap() {
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

std::unique_ptr<MpiChannel::Buffer> MpiChannel::take_spare() {
  if (spare_.empty()) return std::make_unique<Buffer>();
  auto buffer = std::move(spare_.back());
  spare_.pop_back();
  return buffer;
}

bool MpiChannel::send(int peer, const MpiHeader& header, const std::byte* bytes,
                      MpiLibrary::Handle* request) {
  reap();
  const auto there = std::count_if(under_way_.begin(), under_way_.end(),
                                   [&](const auto& buffer) { return buffer->peer == peer; });
  if (there >= kMostUnderWay) return false;
  auto buffer = take_spare();
  buffer->peer = peer;
  buffer->header = header;
  const std::uint64_t within = apart(header) ? 0 : header.bytes;
  if (within > 0) std::memcpy(buffer->bytes, bytes, within);
  library_.check(library_.isend(&buffer->header, static_cast<int>(sizeof header + within), peer,
                                kHeaderTag, communicator_, &buffer->request),
                 "MPI_Isend", peer);
  under_way_.push_back(std::move(buffer));
  if (apart(header)) {
    library_.check(library_.isend(bytes, static_cast<int>(header.bytes), peer, kDataTag,
                                  communicator_, request),
                   "MPI_Isend", peer);
  }
  return true;
}

void MpiChannel::probe() {
  bool there = false;
  MpiLibrary::Handle message = 0;
  int source = 0;
  if (library_.probe(kHeaderTag, communicator_, &there, &message, &source) != 0 || !there) return;
  auto buffer = take_spare();
  buffer->peer = source;
  buffer->coming = Buffer::Coming::kHeader;
  constexpr int kMost = sizeof(MpiHeader) + kMostBytes;
  const int code = library_.receive(&buffer->header, kMost, &message, &buffer->request);
  (code == 0 ? arriving_ : spare_).push_back(std::move(buffer));
}

// Headers of a peer are handled in order, so its data are awaited in the same order.
int MpiChannel::await_data(Buffer& buffer) {
  buffer.place = place_(buffer.header);
  if (buffer.place.begin == nullptr) {
    const auto unread = std::make_shared_for_overwrite<std::byte[]>(buffer.header.bytes);
    buffer.place = {unread.get(), unread};
  }
  buffer.coming = Buffer::Coming::kData;
  return library_.irecv(buffer.place.begin, static_cast<int>(buffer.header.bytes), buffer.peer,
                        kDataTag, communicator_, &buffer.request);
}

MpiChannel::State MpiChannel::look(Buffers::const_iterator at) {
  using Coming = Buffer::Coming;
  Buffer& buffer = **at;
  // A sender that stops within a header delays only its own messages; if it stops within data, it
  // delays only those of the same queue.
  const auto behind = [&](auto&& which) {
    return std::any_of(arriving_.cbegin(), at, [&](const auto& earlier) {
      return earlier->peer == buffer.peer && which(*earlier);
    });
  };
  if (buffer.coming == Coming::kHeader &&
      behind([](const Buffer& earlier) { return earlier.coming == Coming::kHeader; })) {
    return State::kUnderWay;
  }
  if (buffer.coming != Coming::kNothing) {
    bool done = false;
    if (library_.test(&buffer.request, &done) != 0) return State::kFailed;
    if (!done) return State::kUnderWay;
    if (buffer.coming == Coming::kHeader && apart(buffer.header)) {
      return await_data(buffer) == 0 ? State::kUnderWay : State::kFailed;
    }
    buffer.coming = Coming::kNothing;
    buffer.place = {};
  }
  const bool waits =
      behind([&](const Buffer& earlier) { return earlier.header.queue == buffer.header.queue; });
  return waits ? State::kUnderWay : State::kHere;
}

const MpiHeader* MpiChannel::receive() {
  reap();
  if (read_ != nullptr) spare_.push_back(std::move(read_));
  probe();
  for (auto at = arriving_.begin(); at != arriving_.end(); ++at) {
    const State state = look(at);
    if (state == State::kUnderWay) continue;
    auto buffer = std::move(*at);
    arriving_.erase(at);
    if (state == State::kFailed) return nullptr;
    read_ = std::move(buffer);
    return &read_->header;
  }
  return nullptr;
}

}  // namespace pgasdl

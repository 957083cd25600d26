#include "transport/verbs/rail_lane.hpp"

#include <algorithm>

namespace pgasdl {
namespace {

bool comes_before(const RailPiece& piece, std::uint64_t number) {
  return piece.kind == RailPiece::Kind::kWrite   ? piece.number < number
         : piece.kind == RailPiece::Kind::kFence ? piece.number <= number
                                                 : false;
}

}  // namespace

bool RailLane::has_before(std::uint64_t number) const {
  const auto before = [&](const RailPiece& piece) { return comes_before(piece, number); };
  return std::any_of(posted_.begin(), posted_.end(), before) ||
         std::any_of(waiting_.begin(), waiting_.end(), before);
}

void RailLane::push() {
  while (!waiting_.empty() && post(waiting_.front())) {
    posted_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

bool RailLane::post(RailPiece& piece) {
  Transfer transfer{};
  std::span<const Transfer> transfers;
  if (piece.bytes != 0) {
    transfer = {&piece.local->rails[index_], piece.local_offset, &piece.remote->rails[index_],
                piece.remote_offset, piece.bytes};
    transfers = {&transfer, 1};
  }
  VerbsTransport::Posted posted;
  if (piece.kind == RailPiece::Kind::kRead) {
    posted = rail_->read(queue_, peer_, transfers, nullptr);
  } else if (piece.kind == RailPiece::Kind::kFence) {
    posted = rail_->fence(queue_, peer_);
  } else if (piece.flag) {
    const RailFlag& wanted = *piece.flag;
    const RemoteFlag flag{&wanted.remote->rails[index_], wanted.notification, wanted.value,
                          wanted.add};
    posted = rail_->write(queue_, peer_, transfers, &flag);
  } else {
    posted = rail_->write(queue_, peer_, transfers, nullptr);
  }
  if (!posted) return false;
  piece.posted = *posted;
  return true;
}

}  // namespace pgasdl

#include "transport/verbs/rail_lane.hpp"

#include <algorithm>

namespace pgasdl {
namespace {

constexpr int kGenerationShift = 32;  // of a mark

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
  const std::uint64_t before = rail_->mark(queue_, peer_);
  const auto generation = static_cast<std::uint32_t>(before >> kGenerationShift);
  if (generation != generation_) n_flags_ = 0;
  generation_ = generation;
  Transfer transfer{};
  std::span<const Transfer> transfers;
  if (piece.bytes != 0) {
    transfer = {&piece.local->rails[index_], piece.local_offset, &piece.remote->rails[index_],
                piece.remote_offset, piece.bytes};
    transfers = {&transfer, 1};
  }
  bool posted = false;
  if (piece.kind == RailPiece::Kind::kRead) {
    posted = rail_->post_read(queue_, peer_, transfers, nullptr);
  } else if (piece.kind == RailPiece::Kind::kFence) {
    posted = rail_->fence(queue_, peer_);
  } else if (piece.flag) {
    const RailFlag& wanted = *piece.flag;
    const RemoteFlag flag{&wanted.remote->rails[index_], wanted.notification, wanted.value,
                          wanted.add};
    posted = rail_->post_write(queue_, peer_, transfers, &flag);
  } else {
    posted = rail_->post_write(queue_, peer_, transfers, nullptr);
  }
  if (!posted) return false;
  // The mark is of the generation before: if the connection was given up meanwhile, so was the
  // piece.
  piece.mark = std::uint64_t{generation} << kGenerationShift |
               static_cast<std::uint32_t>(rail_->mark(queue_, peer_));
  if (piece.flag) {
    piece.flag_number = ++n_flags_;
    piece.flag_is_held = rail_->flags_held(queue_, peer_) != 0;
  }
  return true;
}

void RailLane::posted(RailPiece&& piece) {
  piece.mark = rail_->mark(queue_, peer_);
  posted_.push_back(std::move(piece));
}

// A flag may be held by the rail itself (PGASDL_VERBS_ORDER): it is done with the requests that
// carry it, which come later.
VerbsFate RailLane::fate(RailPiece& piece) const {
  const VerbsFate now = rail_->fate(queue_, peer_, piece.mark);
  if (now != VerbsFate::kDone || !piece.flag_is_held) return now;
  const std::size_t n_held = rail_->flags_held(queue_, peer_);
  if (rail_->broken(queue_, peer_)) return VerbsFate::kFailed;
  if (n_flags_ - n_held < piece.flag_number) return VerbsFate::kUnderWay;
  piece.flag_is_held = false;
  piece.mark = (piece.mark >> kGenerationShift) << kGenerationShift |
               static_cast<std::uint32_t>(rail_->mark(queue_, peer_));
  return rail_->fate(queue_, peer_, piece.mark);
}

}  // namespace pgasdl

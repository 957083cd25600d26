#include "executor/array_copies.hpp"

#include "sys/error.hpp"

namespace pgasdl {

ArrayCopies::ArrayCopies(Waiter& waiter, cuda::Device device, std::byte* copy,
                         const std::byte* result, const std::vector<Extent>& pieces)
    : waiter_(waiter), device_(device), copy_(copy), result_(result) {
  std::uint64_t offset = 0;
  for (const Extent& extent : pieces) {
    piece_of_.insert(piece_of_.end(), extent.lanes, pieces_.size());
    pieces_.push_back({offset, extent.bytes, extent.working, 0, State::kBack,
                       std::make_unique<DeviceMoment>(device)});
    offset += extent.bytes;
  }
}

void ArrayCopies::enqueue(Piece& piece, const DeviceStream& stream, std::byte* to,
                          const std::byte* from) {
  if (piece.bytes != 0) {
    const cuda::Current current(device_);
    cuda::check(cuda::driver().memcpy_async(reinterpret_cast<cuda::DevicePtr>(to + piece.offset),
                                            reinterpret_cast<cuda::DevicePtr>(from + piece.offset),
                                            piece.bytes, stream.get()),
                text("copying ", piece.bytes, " bytes of an array on GPU ", device_));
  }
  piece.moment->mark(stream.get());
}

void ArrayCopies::begin(const std::byte* source, std::byte* target, Lock& lock) {
  target_ = target;
  left_ = pieces_.size();
  expected_.emplace(&waiter_);
  for (Piece& piece : pieces_) {
    piece.state = State::kComing;
    piece.left = piece.working;
  }
  const Outside outside(lock);
  in_.emplace(device_);
  out_.emplace(device_);
  for (Piece& piece : pieces_) enqueue(piece, *in_, copy_, source);
}

void ArrayCopies::send_back(Piece& piece, Lock& lock) {
  piece.state = State::kLeaving;
  const Outside outside(lock);
  enqueue(piece, *out_, target_, result_);
}

void ArrayCopies::lane_ended(std::size_t lane, Lock& lock) {
  Piece& piece = pieces_[piece_of_[lane]];
  if (--piece.left == 0) send_back(piece, lock);
}

bool ArrayCopies::advance(Lock& lock) {
  if (over()) return false;
  bool moved = false;
  for (Piece& piece : pieces_) {
    const bool copied = piece.state == State::kComing || piece.state == State::kLeaving;
    if (!copied || !piece.moment->reached()) continue;
    moved = true;
    if (piece.state == State::kComing) {
      piece.state = State::kHere;
      if (piece.left == 0) send_back(piece, lock);
    } else {
      piece.state = State::kBack;
      --left_;
    }
  }
  if (over()) let_go();
  return moved;
}

void ArrayCopies::let_go() {
  left_ = 0;
  in_.reset();
  out_.reset();
  expected_.reset();
}

void ArrayCopies::drain() {
  wait();
  let_go();
}

void ArrayCopies::wait() const {
  if (in_) in_->wait();
  if (out_) out_->wait();
}

}  // namespace pgasdl

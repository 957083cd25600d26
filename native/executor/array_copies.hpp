// Copies an array between a GPU and the memory that a plan works on, there and back. The copies are
// made in pieces, so that one piece is copied while another travels between ranks.
//
// A piece has its own lanes. Each of their steps waits until the piece is here, and the piece goes
// back after the last step of all its lanes. So a plan does not see the copies, and its proof of
// correctness holds for every piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "executor/outside.hpp"
#include "memory/device_stream.hpp"
#include "pgas/waiter.hpp"

namespace pgasdl {

// Under the executor's lock, which is free while copies are enqueued on a GPU.
class ArrayCopies {
 public:
  struct Extent {
    std::uint64_t bytes;
    std::size_t lanes;    // follow the lanes of the piece before
    std::size_t working;  // those that have steps
  };

  // `copy`: the memory that the plan works on, filled by the pieces in order. `result`: the memory
  // in which the plan leaves what goes back, likewise.
  ArrayCopies(Waiter& waiter, cuda::Device device, std::byte* copy, const std::byte* result,
              const std::vector<Extent>& pieces);

  // Enqueues the copies of all pieces. The caller may reuse the array once over() is true.
  void begin(const std::byte* source, std::byte* target, Lock& lock);
  // Looks at the progress of the copies; true if anything moved.
  bool advance(Lock& lock);
  bool here(std::size_t lane) const { return pieces_[piece_of_[lane]].state != State::kComing; }
  // The lane has made its last step.
  void lane_ended(std::size_t lane, Lock& lock);
  // Pieces that are not back.
  std::size_t left() const { return left_; }
  bool over() const { return left_ == 0; }
  // Waits until no copy is under way: the array is the caller's again.
  void drain();
  // Waits likewise, but changes nothing.
  void wait() const;

 private:
  enum class State : std::uint8_t { kComing, kHere, kLeaving, kBack };
  struct Piece {
    std::uint64_t offset;
    std::uint64_t bytes;
    std::size_t working;
    std::size_t left;  // lanes that still have steps
    State state;
    std::unique_ptr<DeviceMoment> moment;  // the end of its last copy
  };
  void enqueue(Piece& piece, const DeviceStream& stream, std::byte* to, const std::byte* from);
  void send_back(Piece& piece, Lock& lock);
  void let_go();

  Waiter& waiter_;
  const cuda::Device device_;
  std::byte* const copy_;
  const std::byte* const result_;
  std::vector<Piece> pieces_;
  std::vector<std::size_t> piece_of_;  // by lane
  std::size_t left_ = 0;               // pieces that are not back
  std::byte* target_ = nullptr;
  // Set while copies are under way.
  std::optional<DeviceStream> in_;
  std::optional<DeviceStream> out_;
  std::optional<Waiter::Expectation> expected_;
};

}  // namespace pgasdl

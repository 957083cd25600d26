// Writes and flags as MPI's messages: where a peer's window is not mapped.
//
// Messages of one communicator do not overtake each other, so a short write and its flag are one
// message and one way, where an MPI_Put, its flush and the flag are three. Longer data follow their
// header as a message of their own, from the source into the place that the receiver finds for
// them, without a copy between. The receiver is the library of the rank that waits for the flag: it
// looks when that rank looks.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "transport/mpi/library.hpp"

namespace pgasdl {

// A window, by what is the same on both sides.
struct MpiWindowName {
  std::uint64_t group;
  std::uint64_t number;
  auto operator<=>(const MpiWindowName&) const = default;
};

// A header goes ahead of the bytes: where they belong, and the flag that they come with. Or a
// question whether all messages so far were put where they belong, which is answered with its
// number. Or of the meeting that `board` names (meeting.cpp).
struct MpiHeader {
  enum class Kind : std::uint64_t { kWrite, kAsk, kAnswer, kCome, kLeave, kGo, kLeft };
  static constexpr std::uint64_t kNoQueue = ~std::uint64_t{0};
  Kind kind{};
  std::uint64_t question = 0;      // or the meeting's number
  std::uint64_t queue = kNoQueue;  // of the sender: what comes of one takes effect in its order
  MpiWindowName data{};
  std::uint64_t offset = 0;
  MpiWindowName board{};  // of no window: there is no flag
  std::uint32_t notification = 0;
  std::uint32_t value = 0;
  std::uint64_t bytes = 0;
  std::uint32_t apart = 0;  // 1: they follow as a message of their own
  std::uint32_t add = 0;    // 1: the value is added to the flag
};

// Where long data go, and what keeps that memory.
struct MpiPlace {
  std::byte* begin = nullptr;
  std::shared_ptr<void> keep;
};

// Every member: by one thread at a time, who may call MPI.
class MpiChannel {
 public:
  // The most bytes of data that come with their header; a message more costs more than two copies
  // of them.
  static constexpr std::uint32_t kMostBytes = 32 << 10;
  static bool apart(const MpiHeader& header) {
    return header.kind == MpiHeader::Kind::kWrite && header.apart == 1 && header.bytes > 0 &&
           header.bytes <= MpiLibrary::kMostBytes;
  }

  // `place`: of the long data that a header announces; null: nowhere.
  MpiChannel(MpiLibrary& library, MpiLibrary::Handle communicator,
             std::function<MpiPlace(const MpiHeader&)> place)
      : library_(library), communicator_(communicator), place_(std::move(place)) {}

  // The bytes may change afterwards; long ones when `request` is complete. False: too many are on
  // their way there, nothing was sent.
  bool send(int peer, const MpiHeader& header, const std::byte* bytes,
            MpiLibrary::Handle* request = nullptr);
  // Lets the library work on what has come in. The header that came, and its bytes, until the next
  // call; long ones are in their place. Null: none.
  const MpiHeader* receive();
  const std::byte* bytes() const { return read_->bytes; }
  int sender() const { return read_->peer; }
  // Parts of messages are still to come.
  bool receiving() const { return !arriving_.empty(); }

 private:
  struct Buffer {
    MpiHeader header;
    std::byte bytes[kMostBytes];
    MpiLibrary::Handle request;
    int peer;
    enum class Coming : std::uint8_t { kHeader, kData, kNothing } coming;  // by `request`
    MpiPlace place;
  };
  static_assert(offsetof(Buffer, bytes) == sizeof(MpiHeader));
  using Buffers = std::vector<std::unique_ptr<Buffer>>;
  // To one peer: one that has stopped must not take all that the library has for messages.
  static constexpr int kMostUnderWay = 8;

  std::unique_ptr<Buffer> take_spare();
  void reap();
  void probe();
  int await_data(Buffer& buffer);
  enum class State : std::uint8_t { kUnderWay, kHere, kFailed };
  State look(Buffers::const_iterator at);

  MpiLibrary& library_;
  const MpiLibrary::Handle communicator_;
  const std::function<MpiPlace(const MpiHeader&)> place_;
  Buffers spare_;
  Buffers under_way_;
  // In the order of their arrival, which is that of each sender's.
  Buffers arriving_;
  std::unique_ptr<Buffer> read_;
};

}  // namespace pgasdl

// Writes and flags as MPI messages, for peers whose window is not mapped.
//
// Messages of one communicator do not overtake each other, so a short write and its flag are one
// message, where MPI_Put, flush and flag take three. Longer data follow their header as a message
// of their own, from the source straight to the place that the receiver finds for them. The library
// of the rank that waits for the flag receives messages when that rank polls.
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

// A window, named in the same way on both sides.
struct MpiWindowName {
  std::uint64_t group;
  std::uint64_t number;
  auto operator<=>(const MpiWindowName&) const = default;
};

// Precedes the bytes: says where they belong, and the flag that comes with them. Or asks whether
// all earlier messages have reached their places, which is answered with the question's number. Or
// belongs to the meeting that `board` names (meeting.cpp).
struct MpiHeader {
  enum class Kind : std::uint64_t { kWrite, kAsk, kAnswer, kCome, kLeave, kGo, kLeft };
  static constexpr std::uint64_t kNoQueue = ~std::uint64_t{0};
  Kind kind{};
  std::uint64_t question = 0;      // or the meeting's number
  std::uint64_t queue = kNoQueue;  // of the sender: one queue's messages take effect in order
  MpiWindowName data{};
  std::uint64_t offset = 0;
  MpiWindowName board{};  // names no window if there is no flag
  std::uint32_t notification = 0;
  std::uint32_t value = 0;
  std::uint64_t bytes = 0;
  std::uint32_t apart = 0;  // 1: the bytes follow as a message of their own
  std::uint32_t add = 0;    // 1: adds the value to the flag
};

// The target of long data, and what keeps its memory.
struct MpiPlace {
  std::byte* begin = nullptr;
  std::shared_ptr<void> keep;
};

// Members are called by one thread at a time, which may call MPI.
class MpiChannel {
 public:
  // The most bytes that travel with their header; copying more costs more than another message.
  static constexpr std::uint32_t kMostBytes = 32 << 10;
  static bool apart(const MpiHeader& header) {
    return header.kind == MpiHeader::Kind::kWrite && header.apart == 1 && header.bytes > 0 &&
           header.bytes <= MpiLibrary::kMostBytes;
  }

  // `place`: finds the target of the long data that a header announces; null: there is none.
  MpiChannel(MpiLibrary& library, MpiLibrary::Handle communicator,
             std::function<MpiPlace(const MpiHeader&)> place)
      : library_(library), communicator_(communicator), place_(std::move(place)) {}

  // The bytes may change after the call, long ones once `request` is complete. False: too many
  // messages are under way to the peer, and nothing was sent.
  bool send(int peer, const MpiHeader& header, const std::byte* bytes,
            MpiLibrary::Handle* request = nullptr);
  // Lets the library handle what has arrived. Returns a header that stays, with its bytes, until
  // the next call; long data are in their place already. Null: none.
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
  // To one peer: a stopped peer must not use up all the library's memory for messages.
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
  // In the order of arrival, which keeps each sender's order.
  Buffers arriving_;
  std::unique_ptr<Buffer> read_;
};

}  // namespace pgasdl

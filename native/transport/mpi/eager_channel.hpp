// Flags, and short writes before them, as MPI's messages: where a peer's window is not mapped.
//
// Messages of one communicator do not overtake each other, so a short write and its flag are one
// message and one way, where an MPI_Put, its flush and the flag are three. The receiver is the
// library of the rank that waits for the flag: it looks when that rank looks.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/mpi/library.hpp"

namespace pgasdl {

// A window, by what is the same on both sides.
struct MpiWindowName {
  std::uint64_t group;
  std::uint64_t number;
  auto operator<=>(const MpiWindowName&) const = default;
};

// What goes ahead of the bytes: where they belong, and the flag that they come with. Or a question
// whether all messages so far were put where they belong, which is answered with its number. Or of
// the meeting that `board` names (meeting.cpp).
struct MpiHeader {
  enum class Kind : std::uint64_t { kFlag, kAsk, kAnswer, kCome, kLeave, kGo, kLeft };
  Kind kind{};
  std::uint64_t question = 0;  // or the meeting's number
  MpiWindowName data{};
  std::uint64_t offset = 0;
  MpiWindowName board{};
  std::uint32_t notification = 0;
  std::uint32_t value = 0;
  std::uint64_t bytes = 0;
};

// Every member: by one thread at a time, who may call MPI.
class MpiEagerChannel {
 public:
  // Longer than this, a put and its flush are no slower.
  static constexpr std::uint32_t kMostBytes = 32 << 10;

  MpiEagerChannel(MpiLibrary& library, MpiLibrary::Handle communicator)
      : library_(library), communicator_(communicator) {}

  // The bytes may change afterwards. False: too many are on their way there, nothing was sent.
  bool send(int peer, const MpiHeader& header, const std::byte* bytes);
  // Lets the library work on what has come in. The header that came, and its bytes, until the next
  // call; null: none.
  const MpiHeader* receive();
  const std::byte* bytes() const { return read_->bytes; }
  int sender() const { return read_->peer; }

 private:
  struct Buffer {
    MpiHeader header;
    std::byte bytes[kMostBytes];
    MpiLibrary::Handle request;
    int peer;
  };
  static_assert(offsetof(Buffer, bytes) == sizeof(MpiHeader));
  using Buffers = std::vector<std::unique_ptr<Buffer>>;
  // To one peer: one that has stopped must not take all that the library has for messages.
  static constexpr int kMostUnderWay = 8;

  std::unique_ptr<Buffer> take_spare();
  void reap();

  MpiLibrary& library_;
  const MpiLibrary::Handle communicator_;
  Buffers spare_;
  Buffers under_way_;
  // In the order of their arrival, which is that of each sender's.
  Buffers arriving_;
  std::unique_ptr<Buffer> read_;
};

}  // namespace pgasdl

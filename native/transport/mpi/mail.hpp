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
  std::uint64_t circle;
  std::uint64_t number;
  auto operator<=>(const MpiWindowName&) const = default;
};

// What goes ahead of the bytes: where they belong, and the flag that they come with. Or a question
// whether all letters so far were put where they belong, which is answered with its number. Or of
// the meeting that `board` names (mpi_meeting.cpp).
struct MpiLetter {
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
class MpiMail {
 public:
  // Longer than this, a put and its flush are no slower.
  static constexpr std::uint32_t kMostBytes = 32 << 10;

  MpiMail(MpiLibrary& library, MpiLibrary::Handle communicator)
      : library_(library), communicator_(communicator) {}

  // The bytes may change afterwards. False: too many are on their way there, nothing was sent.
  bool send(int peer, const MpiLetter& letter, const std::byte* bytes);
  // Lets the library work on what has come in. The letter that came, and its bytes, until the next
  // call; null: none.
  const MpiLetter* receive();
  const std::byte* bytes() const { return read_->bytes; }
  int sender() const { return read_->peer; }

 private:
  struct Sheet {
    MpiLetter letter;
    std::byte bytes[kMostBytes];
    MpiLibrary::Handle request;
    int peer;
  };
  static_assert(offsetof(Sheet, bytes) == sizeof(MpiLetter));
  using Sheets = std::vector<std::unique_ptr<Sheet>>;
  // To one peer: one that has stopped must not take all that the library has for messages.
  static constexpr int kMostUnderWay = 8;

  std::unique_ptr<Sheet> take_spare();
  void reap();

  MpiLibrary& library_;
  const MpiLibrary::Handle communicator_;
  Sheets spare_;
  Sheets under_way_;
  // In the order of their arrival, which is that of each sender's.
  Sheets arriving_;
  std::unique_ptr<Sheet> read_;
};

}  // namespace pgasdl

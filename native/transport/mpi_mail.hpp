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

#include "transport/mpi_library.hpp"

namespace pgasdl {

// A window, by what is the same on both sides.
struct MpiWindowName {
  std::uint64_t circle;
  std::uint64_t number;
  auto operator<=>(const MpiWindowName&) const = default;
};

// What goes ahead of the bytes: where they belong, and the flag that they come with.
struct MpiLetter {
  MpiWindowName data;
  std::uint64_t offset;
  MpiWindowName board;
  std::uint32_t notification;
  std::uint32_t value;
  std::uint64_t bytes;
};

// Every member: by one thread at a time, who may call MPI.
class MpiMail {
 public:
  // Longer than this, a put and its flush are no slower.
  static constexpr std::uint32_t kMostBytes = 32 << 10;

  MpiMail(MpiLibrary& library, MpiLibrary::Handle communicator)
      : library_(library), communicator_(communicator) {}

  // The bytes may change afterwards. False: too many are under way, nothing was sent.
  bool send(int peer, const MpiLetter& letter, const std::byte* bytes);
  // Lets the library work on what has come in. The letter that came, and its bytes, until the next
  // call; null: none.
  const MpiLetter* receive();
  const std::byte* bytes() const { return arrival_.bytes; }

 private:
  struct Sheet {
    MpiLetter letter;
    std::byte bytes[kMostBytes];
    MpiLibrary::Handle request;
  };
  static_assert(offsetof(Sheet, bytes) == sizeof(MpiLetter));
  static constexpr std::size_t kMostUnderWay = 64;

  void reap();

  MpiLibrary& library_;
  const MpiLibrary::Handle communicator_;
  std::vector<std::unique_ptr<Sheet>> spare_;
  std::vector<std::unique_ptr<Sheet>> under_way_;
  Sheet arrival_;
  bool arriving_ = false;
};

}  // namespace pgasdl

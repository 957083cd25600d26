// What travels on a connection of transport tcp. All ranks run the same version on the same kind of
// processor, as the handshake finds out.
//
// Each connection carries the requests of one rank to another on one queue, and the answers the
// other way. A request is a frame, and after a write its bytes. The peer takes requests in order,
// so a flag is raised after all bytes before it, and counts them: an acknowledgement is that count.
#pragma once

#include <array>
#include <cstdint>

namespace pgasdl {

struct TcpFrame {
  enum class Kind : std::uint32_t {
    kWrite = 1,    // followed by `bytes` for [offset, offset + bytes) of segment `memory`
    kRead,         // asks for those bytes
    kAdd,          // asks for the old value of a word at `offset`, and adds `operand`
    kSwap,         // likewise, and stores `operand` if the word is `compare`
    kAsk,          // asks for an acknowledgement; not counted
    kData,         // answers kRead: followed by `bytes`
    kOld,          // answers kAdd and kSwap: `operand`
    kRefused,      // answers a read or an atomic: there is no such segment any more
    kAcknowledge,  // `operand` requests have been taken in all; `value`: a write was refused
    kFarewell,     // `operand`: a word about the end of the rank that answers
  };
  // Of a write: what to do with the word `notification` of the board of segment `board`, after all
  // its bytes.
  enum class Flag : std::uint32_t { kNone, kStore, kAdd };

  Kind kind;
  Flag flag = Flag::kNone;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t operand = 0;
  std::uint64_t compare = 0;
  std::uint32_t memory = 0;
  std::uint32_t board = 0;
  std::uint32_t notification = 0;
  std::uint32_t value = 0;

  // Bytes that follow.
  std::uint64_t payload() const { return kind == Kind::kWrite || kind == Kind::kData ? bytes : 0; }
};
static_assert(sizeof(TcpFrame) == 56);

// The handshake, in three messages. Both ends prove that they know the job's token, which never
// travels: a code over the greeting and the other end's fresh random bytes cannot be replayed.
using TcpNonce = std::array<char, 16>;
struct TcpGreeting {                                            // of the rank that connects
  static constexpr std::uint64_t kMagic = 0x31706374'6c646770;  // "pgdltcp1"
  std::uint64_t magic = kMagic;
  std::int32_t size = 0;
  std::int32_t from = 0;
  std::int32_t to = 0;
  std::uint32_t queue = 0;
  TcpNonce nonce{};
};
struct TcpReply {
  TcpNonce nonce{};
  std::uint64_t code = 0;
};
struct TcpProof {
  std::uint64_t code = 0;
};

}  // namespace pgasdl

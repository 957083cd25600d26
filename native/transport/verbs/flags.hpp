// Flags that travel with their data: the last write of a chain carries an immediate, from which the
// thread that polls at the receiver raises the flag. So a write_notify is one message instead of
// two. Data reach memory without the receiver's processor, in the order of all writes.
//
// An immediate has 32 bits: the number of a slot, and the highest and lowest twelve bits of the
// flag's value, which are those that change (plans count in the highest, programs in the lowest).
// The sender writes the meaning of a slot into the receiver's memory when it first uses it. Every
// immediate takes one of the receives that the receiver holds ready; the sender reads there from
// time to time how many were taken. If none is left, as with a receiver that computes for long, or
// if the slot still means another flag, the flag is a message of its own, which needs no processor.
// So are flags without data.
//
// An added flag is always an immediate: an adapter's atomics are not atomic to the processor. So is
// every flag where flags are counted (VerbsOptions::count_flags), except those that may be stored
// twice. Without a receive or a slot, such a flag waits.
//
// Flags of one notification stay in order: while its last immediate may not have been taken, the
// next flag is an immediate too, or waits.
#pragma once

#include <array>
#include <map>
#include <mutex>

#include "transport/transport.hpp"

namespace pgasdl {

// The boards of this rank's segments, by numbers that peers know. Any thread.
class VerbsBoards {
 public:
  std::uint32_t add(FlagWord* board, std::uint32_t notifications);
  void remove(std::uint32_t number);
  // Raises the flag that a peer asks for; does nothing if there is no such flag, or no longer.
  void raise(std::uint32_t board, std::uint32_t notification, std::uint32_t value, bool add);
  void set_wake_word(WakeWord* wake_word) {
    wake_word_.store(wake_word, std::memory_order_release);
  }
  WakeWord* wake_word() const { return wake_word_.load(std::memory_order_acquire); }

 private:
  struct Board {
    FlagWord* words;
    std::uint32_t notifications;
  };
  std::mutex mutex_;  // also keeps a board while a flag is raised on it
  std::map<std::uint32_t, Board> boards_;
  std::uint32_t next_ = 0;
  std::atomic<WakeWord*> wake_word_{nullptr};
};

// The slots that a connection's sender chooses for flags, and the receiver's use of immediates.
class VerbsFlags {
 public:
  explicit VerbsFlags(bool counted = false) : counted_(counted) {}

  // The most immediates under way. The receiver posts half of them anew when half were taken.
  static constexpr std::uint32_t kReceives = 128;
  static constexpr std::uint32_t kOffer = kReceives / 2;
  static constexpr std::uint32_t kSlots = 256;

  struct Slot {
    std::uint32_t board;
    std::uint32_t notification;
    std::uint32_t middle;   // bits of the value
    std::uint32_t defined;  // 0: not yet; or one of these
    static constexpr std::uint32_t kSets = 1;
    static constexpr std::uint32_t kAdds = 2;
  };
  // Registered memory of a connection's end.
  struct Shared {
    std::array<Slot, kSlots> slots;    // written by the peer
    std::atomic<std::uint32_t> taken;  // immediates, in total; read by the peer
    std::uint32_t padding;
    std::atomic<std::uint32_t> answer;  // the peer's `taken`, as last read
  };

  enum class Way : std::uint8_t { kMessage, kImmediate, kWait };
  struct Choice {
    Way way = Way::kMessage;
    bool ask = false;              // read the peer's `taken`
    const Slot* define = nullptr;  // to be written first
    std::uint32_t slot = 0;
    std::uint32_t immediate = 0;
  };

  // --- sender, under the connection's lock
  // `taken`: immediates that the peer had taken at the last read; `asking`: a read is under way.
  // The choice is final.
  Choice choose(std::uint32_t board, const RemoteFlag& flag, bool with_data, std::uint32_t taken,
                bool asking);

  // --- receiver
  static void raise(std::uint32_t immediate, const Shared& shared, VerbsBoards& boards);

 private:
  static constexpr int kSlotShift = 24;
  static constexpr std::uint32_t kMiddle = 0x000ff000;  // of a value
  static constexpr std::uint32_t kLow = 0x00000fff;
  static constexpr int kMiddleBits = 8;

  bool counted_;
  std::array<Slot, kSlots> slots_{};
  std::array<std::uint64_t, kSlots> last_{};  // the last immediate that used it, from 1
  std::uint64_t sent_ = 0;                    // immediates, in total
  std::uint32_t since_asked_ = 0;             // flags with data
};

}  // namespace pgasdl

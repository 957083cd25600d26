#include "transport/verbs/flags.hpp"

#include "transport/raise_flag.hpp"

namespace pgasdl {

std::uint32_t VerbsBoards::add(FlagWord* board, std::uint32_t notifications) {
  const std::lock_guard lock(mutex_);
  boards_[next_] = {board, notifications};
  return next_++;
}

void VerbsBoards::remove(std::uint32_t number) {
  const std::lock_guard lock(mutex_);
  boards_.erase(number);
}

void VerbsBoards::raise(std::uint32_t board, std::uint32_t notification, std::uint32_t value,
                        bool add) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = boards_.find(board);
    if (found == boards_.end() || notification >= found->second.notifications) return;
    raise_flag(found->second.words[notification], value, add);
  }
  if (WakeWord* wake_word = this->wake_word()) wake_word->wake();
}

VerbsFlags::Choice VerbsFlags::choose(std::uint32_t board, const RemoteFlag& flag, bool with_data,
                                      std::uint32_t low_taken, bool asking) {
  const std::uint32_t notification = flag.notification;
  const std::uint32_t value = flag.value;
  const bool immediate = flag.add || (counted_ && !flag.again);
  const std::uint32_t kind = flag.add ? Slot::kAdds : Slot::kSets;
  const std::uint64_t taken = sent_ - (static_cast<std::uint32_t>(sent_) - low_taken);
  const auto left = static_cast<std::uint32_t>(kReceives - (sent_ - taken / kOffer * kOffer));
  const std::uint32_t number = (notification + board * 2654435761u) % kSlots;
  Slot& slot = slots_[number];
  const bool known = slot.defined != 0 && slot.board == board && slot.notification == notification;
  // It may still mean a flag that the peer has not raised.
  const bool pending = slot.defined != 0 && last_[number] > taken;
  Choice choice;
  if (!with_data && !immediate && !(known && pending)) return choice;
  const bool same = known && slot.defined == kind && slot.middle == (value & kMiddle);
  ++since_asked_;
  if (left != 0 && (same || !pending)) {
    choice.way = Way::kImmediate;
    if (!same) {
      slot = {board, notification, value & kMiddle, kind};
      choice.define = &slot;
    }
    choice.slot = number;
    choice.immediate =
        number << kSlotShift | (value & ~(kMiddle | kLow)) >> kMiddleBits | (value & kLow);
    last_[number] = ++sent_;
  } else if (immediate || (known && pending)) {
    choice.way = Way::kWait;
  }
  choice.ask =
      !asking && (choice.way == Way::kWait || (left <= kOffer && since_asked_ >= kOffer / 2));
  if (choice.ask) since_asked_ = 0;
  return choice;
}

void VerbsFlags::raise(std::uint32_t immediate, const Shared& shared, VerbsBoards& boards) {
  const Slot& slot = shared.slots[immediate >> kSlotShift];
  const std::uint32_t high = (immediate << kMiddleBits) & ~(kMiddle | kLow);
  const std::uint32_t value = high | (slot.middle & kMiddle) | (immediate & kLow);
  boards.raise(slot.board, slot.notification, value, slot.defined == Slot::kAdds);
}

}  // namespace pgasdl

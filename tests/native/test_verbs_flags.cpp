// Flags that travel as immediates, without a device: a queue pair is a list that keeps its order.

#include <deque>
#include <random>
#include <vector>

#include "check.hpp"
#include "transport/verbs/flags.hpp"

namespace {

using namespace pgasdl;

constexpr std::uint32_t kNotifications = 2000;

// Both ends of a connection: messages take effect at once, but immediates wait to be taken.
struct Ends {
  explicit Ends(bool counted = false)
      : sender(counted), shared(std::make_unique<VerbsFlags::Shared>()), words(2 * kNotifications) {
    // Board numbers that are not in use yet, and others that are.
    boards.remove(boards.add(words.data(), 1));
    for (std::uint32_t board = 0; board < 2; ++board) {
      numbers.push_back(boards.add(words.data() + board * kNotifications, kNotifications));
    }
  }

  // False: the flag has to wait.
  bool send(std::uint32_t board, std::uint32_t notification, std::uint32_t value, bool with_data,
            bool add = false) {
    const RemoteFlag flag{nullptr, notification, value, add};
    const auto choice = sender.choose(numbers[board], flag, with_data, answer, false);
    if (choice.way != VerbsFlags::Way::kWait) {
      if (choice.define != nullptr) shared->slots[choice.slot] = *choice.define;
      if (choice.way == VerbsFlags::Way::kImmediate) {
        under_way.push_back(choice.immediate);
        // Immediates taken since the last offer have left no receive.
        CHECK(under_way.size() + shared->taken.load() % VerbsFlags::kOffer <=
              VerbsFlags::kReceives);
        ++immediates;
      } else {
        CHECK(!add);
        words[board * kNotifications + notification].store(value);
        ++messages;
      }
    }
    if (choice.ask) answer = shared->taken.load();
    if (choice.ask) ++asked;
    return choice.way != VerbsFlags::Way::kWait;
  }
  void take() {
    if (under_way.empty()) return;
    VerbsFlags::raise(under_way.front(), *shared, boards);
    under_way.pop_front();
    shared->taken.fetch_add(1);
  }

  VerbsFlags sender;
  VerbsBoards boards;
  std::unique_ptr<VerbsFlags::Shared> shared;
  std::vector<FlagWord> words;
  std::vector<std::uint32_t> numbers;
  std::deque<std::uint32_t> under_way;
  std::uint32_t answer = 0;
  std::uint64_t immediates = 0;
  std::uint64_t messages = 0;
  std::uint64_t asked = 0;
};

// A receiver that keeps taking gets every flag of data as an immediate, with few exceptions.
void keeps_pace() {
  Ends ends;
  for (std::uint32_t round = 1; round <= 100'000; ++round) {
    const std::uint32_t notification = round % 7;
    CHECK(ends.send(0, notification, round % 4096, true));
    ends.take();
    CHECK(ends.words[notification].load() == round % 4096);
  }
  CHECK(ends.messages == 0 && ends.asked < 100'000 / 30);
  CHECK(ends.send(0, 8, 1, false));
  CHECK(ends.messages == 1);
  // Values as plans have them; then arbitrary ones, which may need a slot to become free.
  for (std::uint32_t round = 1; round <= 5000; ++round) {
    CHECK(ends.send(0, 9, round << 20 | 0xabcde, true));
    ends.take();
    CHECK(ends.words[9].load() == (round << 20 | 0xabcde));
    const std::uint32_t value = round * 12345677;
    CHECK(ends.send(0, 10, value, true) || ends.send(0, 10, value, true));
    ends.take();
    CHECK(ends.words[10].load() == value);
  }
  CHECK(ends.messages == 1);
}

// A receiver that takes nothing still gets its flags, once no receive is left.
void away() {
  Ends ends;
  for (std::uint32_t id = 0; id < 1000; ++id) CHECK(ends.send(0, id, 5, true));
  CHECK(ends.immediates == VerbsFlags::kReceives && ends.messages == 1000 - VerbsFlags::kReceives);
  // A later flag of one notification must not overtake the first.
  CHECK(!ends.send(0, 0, 6, true) && !ends.send(0, 0, 6, false));
  CHECK(ends.words[0].load() == 0 && ends.words[999].load() == 5);
  while (!ends.under_way.empty()) ends.take();
  while (!ends.send(0, 0, 6, true)) {
  }
  ends.take();
  CHECK(ends.words[0].load() == 6);
}

// Any order of flags and of taking: a word never decreases, and ends with the last value.
void any_order(std::uint32_t seed) {
  std::mt19937 random(seed);
  Ends ends;
  std::vector<std::uint32_t> sent(2 * kNotifications);
  std::vector<std::uint32_t> seen(2 * kNotifications);
  const std::uint32_t ids = 1 + random() % (random() % 2 == 0 ? 10 : kNotifications);
  const std::uint32_t laziness = 1 + random() % 5;
  for (int step = 0; step < 20'000; ++step) {
    const std::uint32_t board = random() % 2;
    const std::uint32_t id = random() % ids;
    const std::uint32_t at = board * kNotifications + id;
    // Sometimes a step that changes the high bits.
    const std::uint32_t value = sent[at] + 1 + (random() % 50 == 0 ? random() % (1u << 26) : 0);
    if (value > sent[at] && ends.send(board, id, value, random() % 4 != 0)) sent[at] = value;
    if (random() % laziness == 0) ends.take();
    CHECK(ends.words[at].load() >= seen[at]);
    seen[at] = ends.words[at].load();
  }
  while (!ends.under_way.empty()) {
    ends.take();
    for (std::size_t at = 0; at < seen.size(); ++at) {
      CHECK(ends.words[at].load() >= seen[at]);
      seen[at] = ends.words[at].load();
    }
  }
  for (std::size_t at = 0; at < sent.size(); ++at) CHECK(ends.words[at].load() == sent[at]);
  CHECK(ends.immediates != 0);
}

// Additions among flags that are set: none is lost or made twice, and they wait for room, as all
// flags do if all are `counted`.
void additions(std::uint32_t seed, bool counted) {
  std::mt19937 random(seed);
  Ends ends(counted);
  std::vector<std::uint32_t> sent(2 * kNotifications);
  const std::uint32_t ids = 1 + random() % (random() % 2 == 0 ? 10 : kNotifications);
  const std::uint32_t laziness = 1 + random() % 5;
  std::uint64_t refused = 0;
  for (int step = 0; step < 20'000; ++step) {
    const std::uint32_t board = random() % 2;
    const std::uint32_t id = random() % ids;
    const std::uint32_t at = board * kNotifications + id;
    const bool add = id % 2 == 0;
    const std::uint32_t value = 1 + (random() % 50 == 0 ? random() % (1u << 20) : random() % 3);
    if (!ends.send(board, id, add ? value : sent[at] + value, random() % 2 == 0, add)) {
      ++refused;
    } else {
      sent[at] += value;
    }
    if (random() % laziness == 0) ends.take();
  }
  while (!ends.under_way.empty()) ends.take();
  for (std::size_t at = 0; at < sent.size(); ++at) CHECK(ends.words[at].load() == sent[at]);
  CHECK(laziness < 3 || refused != 0);
  CHECK(!counted || ends.messages == 0);
}

// A flag that may be stored twice takes no receive, and no slot that another flag then waits for.
void stored_again() {
  Ends ends(true);
  for (std::uint32_t notification = 0; notification < VerbsFlags::kSlots; ++notification) {
    const RemoteFlag mark{nullptr, notification + VerbsFlags::kSlots, 1, false, true};
    const auto choice = ends.sender.choose(ends.numbers[0], mark, false, 0, false);
    CHECK(choice.way == VerbsFlags::Way::kMessage && choice.define == nullptr && !choice.ask);
  }
  CHECK(ends.send(0, 0, 1, false));
  CHECK(ends.immediates == 1);
}

// A value set after an addition to the same notification does not overtake it, nor the reverse.
void set_and_added() {
  Ends ends;
  // A second try: the sender first has to read that the previous immediate was taken.
  const auto later = [&](std::uint32_t id, std::uint32_t value, bool with_data, bool add) {
    return ends.send(0, id, value, with_data, add) || ends.send(0, id, value, with_data, add);
  };
  CHECK(ends.send(0, 3, 5, false, true) && !ends.send(0, 3, 9, false) && ends.words[3].load() == 0);
  ends.take();
  CHECK(ends.words[3].load() == 5 && later(3, 9, false, false) && ends.words[3].load() == 9);
  CHECK(later(3, 1, true, true) && ends.words[3].load() == 9);
  ends.take();
  CHECK(ends.words[3].load() == 10);
  // An addition finds no receive, with data or without.
  std::uint32_t sum = 0;
  while (later(4, 1, false, true)) ++sum;
  CHECK(sum <= VerbsFlags::kReceives && sum + VerbsFlags::kOffer >= VerbsFlags::kReceives);
  CHECK(!later(4, 1, true, true));
  while (!ends.under_way.empty()) ends.take();
  CHECK(ends.words[4].load() == sum && later(4, 1, false, true));
  ends.take();
  CHECK(ends.words[4].load() == sum + 1);
}

// A peer's writes are not trusted.
void nonsense() {
  std::mt19937 random(1);
  Ends ends;
  for (int step = 0; step < 100'000; ++step) {
    ends.shared->slots[random() % VerbsFlags::kSlots] = {
        static_cast<std::uint32_t>(random() % 6),
        static_cast<std::uint32_t>(random()) >> random() % 32, static_cast<std::uint32_t>(random()),
        static_cast<std::uint32_t>(random())};
    VerbsFlags::raise(static_cast<std::uint32_t>(random()), *ends.shared, ends.boards);
  }
  // Nor does anything reach a board that is gone.
  for (FlagWord& word : ends.words) word.store(0);
  for (const std::uint32_t number : ends.numbers) ends.boards.remove(number);
  ends.shared->slots.fill({ends.numbers[0], 3, 0, 1});
  VerbsFlags::raise(7, *ends.shared, ends.boards);
  CHECK(ends.words[3].load() == 0);
}

}  // namespace

int main() {
  keeps_pace();
  away();
  for (std::uint32_t seed = 0; seed < 60; ++seed) any_order(seed);
  for (std::uint32_t seed = 0; seed < 60; ++seed) additions(seed, seed % 2 == 0);
  set_and_added();
  stored_again();
  nonsense();
  std::puts("ok");
}

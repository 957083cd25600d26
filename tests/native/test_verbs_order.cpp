// When a flag leaves, on a real device: at once if the fabric keeps the order of writes, else once
// its sender has the completions of earlier requests; and when its arrival is known. One thread is
// both ranks, so only that thread makes progress. Skipped without a device.

#include <algorithm>
#include <array>
#include <thread>

#include "transport/verbs/device.hpp"
#include "verbs.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

constexpr std::size_t kBytes = 100'000;  // several requests on soft-RoCE

struct alignas(4096) Memory {
  std::array<unsigned char, kBytes> data{};
  std::array<FlagWord, 4> board{};
};

VerbsOptions with(VerbsOrder order) {
  VerbsOptions options;
  options.order = order;
  return options;
}

class Pair {
 public:
  Pair(const VerbsOptions& here, const VerbsOptions& there)
      : sender(0, 2, kToken, here), receiver(1, 2, kToken, there) {
    sender.connect(1, receiver.endpoint());
    receiver.connect(0, sender.endpoint());
    const std::array<Rank, 2> both{0, 1};
    for (auto [transport, segment, memory] :
         {std::tuple{&sender, &local, &source}, std::tuple{&receiver, &far, &target}}) {
      segment->data = reinterpret_cast<std::byte*>(memory->data.data());
      segment->bytes = kBytes;
      segment->board = memory->board.data();
      segment->notifications = static_cast<std::uint32_t>(memory->board.size());
      transport->publish(*segment, both);
    }
    remote = sender.attach(1, receiver.publish(far, both), kHost, Deadline::in(5));
    const auto connected = [&] {
      sender.service();
      receiver.service();
      bool all = true;
      for (QueueId queue = 0; queue < here.queues; ++queue) all &= write(8, queue);
      return all;
    };
    until(connected);
    settle();
  }

  bool write(std::size_t bytes, QueueId queue = 0) {
    const Transfer transfer{&local, 0, &remote, 0, bytes};
    return sender.post_write(queue, 1, {&transfer, 1}, nullptr);
  }
  void write_notify(std::size_t bytes, std::uint32_t notification, std::uint32_t value,
                    QueueId queue = 0) {
    const Transfer transfer{&local, 0, &remote, 0, bytes};
    const RemoteFlag flag{&remote, notification, value};
    CHECK(sender.post_write(queue, 1, {&transfer, bytes == 0 ? 0u : 1u}, &flag));
  }

  // Only the receiver polls.
  template <typename Done>
  void until(Done&& done) {
    const auto deadline = Deadline::in(30);
    while (!done()) {
      CHECK(!deadline.passed());
      receiver.progress();
      std::this_thread::yield();
    }
  }
  // Only the sender polls, until all of a queue is complete.
  void wait_for_completions(QueueId queue = 0) {
    const auto deadline = Deadline::in(30);
    do {
      CHECK(!deadline.passed());
      sender.progress();
    } while (!sender.complete(queue));
  }
  // Both poll.
  void settle() {
    until([&] {
      sender.progress();
      return sender.complete(0);
    });
  }
  bool arrived(std::uint32_t notification, std::uint32_t value) const {
    return target.board[notification].load() == value;
  }
  // The flag is absent long after the data have arrived; `before` is the word's earlier value.
  void absent(std::uint32_t notification, std::uint32_t before = 0) {
    until([&] { return target.data == source.data; });
    const auto moment = Deadline::in(0.1);
    until([&] { return moment.passed(); });
    CHECK(arrived(notification, before));
    CHECK(!sender.complete(0));
  }
  void fill(unsigned char byte) { source.data.fill(byte); }

  Memory source;
  Memory target;
  LocalSegment local;
  LocalSegment far;
  VerbsTransport sender;
  VerbsTransport receiver;
  RemoteSegment remote;
};

std::unique_ptr<Pair> one_asks() {
  return std::make_unique<Pair>(with(VerbsOrder::kCompletion), with(VerbsOrder::kAuto));
}

// Data followed by a flag, which leaves without another call of its sender.
void kept(const VerbsOptions& here, const VerbsOptions& there) {
  const auto pair = std::make_unique<Pair>(here, there);
  pair->fill(1);
  CHECK(pair->write(kBytes));
  pair->write_notify(8, 0, 1);
  pair->until([&] { return pair->arrived(0, 1); });
  pair->settle();
}

void completion(const VerbsOptions& here, const VerbsOptions& there) {
  const auto pair = std::make_unique<Pair>(here, there);
  // After other data, after its own, and after another flag.
  pair->fill(1);
  CHECK(pair->write(kBytes));
  pair->write_notify(8, 0, 1);
  pair->absent(0);
  pair->settle();
  pair->until([&] { return pair->arrived(0, 1); });
  pair->fill(2);
  pair->write_notify(kBytes, 1, 7);
  pair->absent(1);
  pair->settle();
  pair->until([&] { return pair->arrived(1, 7); });
  pair->write_notify(0, 2, 1);
  pair->settle();  // the receiver knows which flag it is
  pair->write_notify(0, 2, 2);
  pair->until([&] { return pair->arrived(2, 2); });
  pair->write_notify(0, 3, 5);
  pair->absent(3);
  pair->write_notify(0, 3, 6);
  pair->write_notify(8, 3, 7);
  pair->settle();
  pair->until([&] { return pair->arrived(3, 7); });
  // Data of one request and their flag are one message if nothing is under way and the receiver
  // knows which flag it is.
  for (std::uint32_t value = 1; value < 300; ++value) {
    pair->write_notify(8, 0, 1000 + value);
    if (value == 1) pair->settle();
    pair->until([&] { return pair->arrived(0, 1000 + value); });
    pair->settle();
  }
  // But not after other data, or in the last of several requests.
  pair->fill(3);
  CHECK(pair->write(kBytes));
  pair->write_notify(8, 0, 2000);
  pair->absent(0, 1299);
  pair->settle();
  pair->until([&] { return pair->arrived(0, 2000); });
  pair->fill(4);
  pair->write_notify(kBytes, 0, 2001);
  pair->absent(0, 2000);
  pair->settle();
  pair->until([&] { return pair->arrived(0, 2001); });
}

// A request that was never sent is lost with its connection; the queue reports that, and is
// complete.
void given_up() {
  const auto pair = one_asks();
  pair->write_notify(kBytes, 0, 1);
  pair->sender.reconnect(1);
  CHECK(pair->sender.complete(0));
  CHECK(pair->arrived(0, 0));
}

// So is one that waits for data that cannot arrive: one error, and no endless wait.
void broken() {
  const auto pair = one_asks();
  pair->receiver.retract(pair->far);
  pair->write_notify(kBytes, 0, 1);
  std::string told;
  pair->until([&] {
    pair->sender.progress();
    try {
      CHECK(!pair->sender.complete(0));
    } catch (const Error& error) {
      told = error.what();
    }
    return !told.empty();
  });
  CHECK_NOTE(told.find("refused there") != std::string::npos, "%s", told.c_str());
  pair->settle();
  CHECK(pair->arrived(0, 0));
}

// A flag that was held when it was posted is not done together with earlier requests, even if it
// has left by the time of the first question.
void held_is_not_done() {
  const auto pair = one_asks();
  pair->write_notify(0, 0, 1);
  pair->settle();
  CHECK(pair->write(8));
  const RemoteFlag flag{&pair->remote, 0, 2};
  auto posted = pair->sender.write(0, 1, {}, &flag);
  CHECK(posted && posted->held && posted->flag == 2);
  auto behind = pair->sender.write(0, 1, {}, &flag);
  CHECK(behind && behind->held && behind->flag == 3);
  pair->receiver.part(0);  // nothing arrives any more
  const std::uint64_t mark = pair->sender.mark(0, 1);
  pair->until([&] {
    pair->sender.progress();
    return pair->sender.mark(0, 1) != mark;
  });
  CHECK(pair->sender.fate(0, 1, *posted) == VerbsFate::kUnderWay && !posted->held);
  CHECK(pair->sender.fate(0, 1, *behind) == VerbsFate::kUnderWay && behind->held);
  pair->until([&] {
    pair->sender.progress();
    return pair->sender.broken(0, 1).has_value();
  });
  CHECK(pair->sender.fate(0, 1, *posted) == VerbsFate::kFailed);
  CHECK(pair->sender.fate(0, 1, *behind) == VerbsFate::kFailed);
  pair->sender.reconnect(1);
  CHECK(pair->sender.fate(0, 1, *posted) == VerbsFate::kGone);
  CHECK(pair->sender.fate(0, 1, *behind) == VerbsFate::kGone);
  CHECK(pair->arrived(0, 1));
}

// Nothing of a rank that the receiver goes on without lands: neither what is under way nor what the
// rank posts later, even if it connects anew.
void forgotten() {
  const auto pair = std::make_unique<Pair>(with(VerbsOrder::kAuto), with(VerbsOrder::kAuto));
  pair->fill(1);
  pair->write_notify(kBytes, 0, 1);
  CHECK(pair->receiver.forget(0));
  const auto had = pair->target.data;
  const std::uint32_t flag = pair->target.board[0].load();
  pair->fill(2);
  for (int again = 0; again < 2; ++again) {
    const auto moment = Deadline::in(0.5);
    while (!moment.passed()) {
      try {
        pair->write(kBytes);
        pair->sender.progress();
        pair->sender.complete(0);
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kPeerLost);
      }
      pair->sender.service();
      pair->receiver.service();
      pair->receiver.progress();
    }
    CHECK(pair->target.data == had && pair->arrived(0, flag));
    pair->sender.reconnect(1);
  }
}

decltype(ibv_context_ops::poll_cq) poll_for_real;

// The receiver's next poll finds nothing.
void blind_once(const Pair& pair) {
  auto& poll = pair.receiver.device().context()->ops.poll_cq;
  poll_for_real = std::exchange(poll, [](ibv_cq* queue, int, ibv_wc*) {
    queue->context->ops.poll_cq = poll_for_real;
    return 0;
  });
}

// A flag on a later queue proves that one on an earlier queue has arrived: both arrive while the
// receiver polls, and it must not find only the later one.
void by_two_queues() {
  VerbsOptions two;
  two.count_flags = true;
  two.queues = 2;
  const auto pair = std::make_unique<Pair>(two, two);
  pair->write_notify(8, 0, 1);
  pair->wait_for_completions();
  pair->write_notify(8, 1, 1, 1);
  pair->wait_for_completions(1);
  blind_once(*pair);
  pair->receiver.progress();
  CHECK(pair->arrived(0, 1));
}

// An adapter reports an arrival after the last moment: a rank that drops a rail at once has either
// counted the flag or never raises it.
void told_late() {
  VerbsOptions counted;
  counted.count_flags = true;
  const auto pair = std::make_unique<Pair>(counted, counted);
  pair->write_notify(8, 0, 1);
  pair->wait_for_completions();  // it has arrived, and was not taken
  pair->receiver.part(0);
  blind_once(*pair);
  std::uint32_t taken = 0;
  CHECK(pair->receiver.parted(0, 0, true, taken));
  pair->receiver.progress();
  CHECK_NOTE(taken == (pair->arrived(0, 1) ? 1 : 0), "%u", taken);
}

}  // namespace

int main() {
  if (!have_device()) return 0;
  constexpr auto kAuto = VerbsOrder::kAuto, kKept = VerbsOrder::kKept,
                 kCompletion = VerbsOrder::kCompletion;
  step("kept", [] { kept(with(kKept), with(kKept)); });
  step("auto", [] { kept(with(kAuto), with(kAuto)); });
  step("completion", [] { completion(with(kCompletion), with(kCompletion)); });
  step("one asks", [] { completion(with(kCompletion), with(kAuto)); });
  step("the other", [] { completion(with(kKept), with(kCompletion)); });
  // Flags that the adapter stores.
  const VerbsOptions messages = as_messages(with(kCompletion));
  step("completion", [&] { completion(messages, messages); });
  step("given up", given_up);
  step("broken", broken);
  step("held, not done", held_is_not_done);
  step("forgotten", forgotten);
  step("told late", told_late);
  step("two queues", by_two_queues);
  std::puts("ok");
}

// One-sided operations ordered on a GPU's stream: enqueued as a whole, so the host does not wait.
//
// The stream writes the flag after the copy. A stream's write of a value comes after all that the
// stream did before, for every processor and device, so the flag announces the data. A stream that
// waits for a flag sees what was written before it.
#include "pgas/context.hpp"

namespace pgasdl {
namespace {

void require_reached(const Segment& segment) {
  if (segment.reached()) return;
  throw Error(ErrorKind::kUnavailable,
              text("notifications of segment ", segment.id(), ", which peers do not reach on a ",
                   "GPU, are the host's: ctx.notify_waitsome and ctx.notify_reset"));
}

}  // namespace

std::optional<Outcome> Context::write_notify_on(const StreamOrder& order,
                                                std::span<const Pair> pairs, Rank peer,
                                                const std::shared_ptr<Segment>& segment,
                                                std::uint64_t notification, std::uint64_t value,
                                                QueueId queue, Deadline deadline) {
  require_peer(peer, "write_notify");
  stream_waits_.require();
  const std::vector<Transfer> transfers = checked_list(pairs, peer, true);
  const RemoteFlag flag = checked_flag(*segment, peer, notification, value);
  if (flag.remote->region == nullptr) return std::nullopt;
  for (const Transfer& transfer : transfers) {
    if (transfer.remote->data == nullptr && transfer.bytes != 0) return std::nullopt;
  }
  recorder_.record(Operation::kWriteNotify, peer, segment->id(), notification,
                   pairs.empty() ? 0 : pairs[0].local->bytes);
  (void)mark_block(*segment, flag, peer, queue);
  flag.remote->region->pin(order.device);
  const auto& driver = cuda::driver();
  const cuda::Current current(order.device);
  const auto enqueue = [&] {
    for (const Transfer& transfer : transfers) {
      if (transfer.bytes == 0) continue;
      cuda::check(driver.memcpy_async(cuda::pointer(transfer.remote->data + transfer.remote_offset),
                                      cuda::pointer(transfer.local->data + transfer.local_offset),
                                      transfer.bytes, order.stream),
                  "write_notify on a stream");
    }
    cuda::check(driver.stream_write_value(order.stream,
                                          device_address(&flag.remote->board[flag.notification]),
                                          flag.value, cuda::kWriteValueDefault),
                "a stream's flag (streams of this driver must be able to write values)");
  };
  if (is_capturing(order)) {
    enqueue();  // belongs to the graph: no queue knows when it is replayed
    return Outcome::kDone;
  }
  QueuedStreams::Kept touched{segment};
  for (const Pair& pair : pairs) {
    touched.push_back(pair.local->segment);
    if (pair.remote->segment != segment) touched.push_back(pair.remote->segment);
  }
  Queue& places = queue_at(queue);
  if (take_place(queue, places, deadline) != Outcome::kDone) return Outcome::kFull;
  try {
    queued_streams_.enqueue(queue, order, std::move(touched), enqueue);
  } catch (...) {
    give_back(places, 1);
    throw;
  }
  counters_.add(peer, traffic_written(transfers, true));
  return Outcome::kDone;
}

void Context::notify_wait_on(const StreamOrder& order, const std::shared_ptr<Segment>& segment,
                             std::uint64_t notification, Deadline deadline) {
  require_usable();
  require_reached(*segment);
  stream_waits_.require();
  const FlagWord& word = own_word(*segment, notification);
  refuse_capture(order, kStreamWait);
  segment->local().region->pin(order.device);
  recorder_.record(Operation::kWaitsome, -1, segment->id(), notification, 0);
  const cuda::Current current(order.device);
  const auto enqueue = [&] {
    cuda::check(cuda::driver().stream_wait_value(order.stream, device_address(&word), 1,
                                                 cuda::kWaitValueGeq),
                "letting a stream wait for a notification");
  };
  stream_waits_.wait(order, segment, static_cast<std::uint32_t>(notification), deadline, enqueue);
}

void Context::notify_reset_on(const StreamOrder& order, const std::shared_ptr<Segment>& segment,
                              std::uint64_t notification) {
  require_usable();
  require_reached(*segment);
  stream_waits_.require();
  const FlagWord& word = own_word(*segment, notification);
  segment->local().region->pin(order.device);
  const cuda::Current current(order.device);
  const auto enqueue = [&] {
    cuda::check(cuda::driver().stream_write_value(order.stream, device_address(&word), 0,
                                                  cuda::kWriteValueDefault),
                "resetting a notification on a stream");
  };
  if (is_capturing(order)) {
    enqueue();  // belongs to the graph, which must not record our event at each replay
  } else {
    stream_waits_.touch(order, segment, enqueue);
  }
}

}  // namespace pgasdl

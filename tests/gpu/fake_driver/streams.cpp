#include "streams.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "handles.hpp"
#include "sys/thread.hpp"

struct pgasdl::cuda::EventObject {
  explicit EventObject(Context in) : context(in) {}

  const Context context;
  std::mutex mutex;
  const fake_cuda::Marker* recorded = nullptr;  // null: never
};

namespace fake_cuda {
namespace {

Handles<StreamObject>& streams() {
  static auto& all = *new Handles<StreamObject>;
  return all;
}

Handles<EventObject>& events() {
  static auto& all = *new Handles<EventObject>;
  return all;
}

// std::atomic::wait would order the sleeper's past before the future of the thread that wakes it.
void sleep_while(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
  const timespec most{0, 50'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, &most, nullptr, 0);
}

void wake(const std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

class Delay {
 public:
  explicit Delay(std::uint64_t stream)
      : random_(environment_number("FAKE_SEED", 0) + stream),
        most_(0, environment_number("FAKE_DELAY_US", 50)) {}

  void operator()() {
    if (most_.max() == 0) return;
    std::this_thread::sleep_for(std::chrono::microseconds(most_(random_)));
  }

 private:
  std::mt19937_64 random_;
  std::uniform_int_distribution<std::uint64_t> most_;
};

// An operation that faults ends its context: later operations are skipped.
void run(const Operation& operation, ContextObject& context) {
  if (operation.run == nullptr || context.error.load(std::memory_order_relaxed) != kSuccess) return;
  try {
    operation.run();
  } catch (const Fault&) {
    context.error.store(kIllegalAddress, std::memory_order_relaxed);
  }
}

void work(const std::shared_ptr<StreamObject>& stream, std::uint64_t number) {
  Delay delay(number);
  while (!ended()) {
    const std::uint32_t seen = stream->n_submitted.load(std::memory_order_acquire);
    Operation* next = stream->head->next.load(std::memory_order_acquire);
    if (next == nullptr) {
      sleep_while(stream->n_submitted, seen);
      continue;
    }
    delete std::exchange(stream->head, next);
    delay();
    if (ended()) return;
    run(*next, *stream->context);
    next->run = nullptr;
    next->done->raise();
    if (next->last) return;
  }
}

// Keeps a stream for ever, with its markers.
void keep(std::shared_ptr<StreamObject> stream) {
  static std::mutex mutex;
  static auto& all = *new std::vector<std::shared_ptr<StreamObject>>;
  const std::scoped_lock lock(mutex);
  all.push_back(std::move(stream));
}

std::shared_ptr<StreamObject> start(Context context, unsigned flags) {
  static std::atomic<std::uint64_t> n_started{0};
  auto stream = std::make_shared<StreamObject>(context, flags);
  stream->markers.emplace_back().raise();
  keep(stream);
  const std::uint64_t number = n_started.fetch_add(1, std::memory_order_relaxed);
  pgasdl::thread_without_signals([stream, number] { work(stream, number); }).detach();
  return stream;
}

std::shared_ptr<StreamObject> null_stream(Context context) {
  static std::mutex mutex;
  static auto& all = *new std::map<Context, std::shared_ptr<StreamObject>>;
  const std::scoped_lock lock(mutex);
  auto& stream = all[context];
  if (stream == nullptr) stream = start(context, 0);
  return stream;
}

const Marker* last_of(StreamObject& stream) {
  const std::scoped_lock lock(stream.mutex);
  return &stream.markers.back();
}

// The null stream waits for all blocking streams, and they wait for it.
std::vector<const Marker*> implied(StreamObject& stream) {
  if ((stream.flags & kStreamNonBlocking) != 0) return {};
  const auto null = null_stream(stream.context);
  if (&stream != null.get()) return {last_of(*null)};
  std::vector<const Marker*> all;
  for (const auto& other : streams().all()) {
    if (other->context == stream.context && (other->flags & kStreamNonBlocking) == 0) {
      all.push_back(last_of(*other));
    }
  }
  return all;
}

const Marker& enqueue(StreamObject& stream, std::unique_ptr<Operation> operation) {
  const Marker* done = nullptr;
  {
    const std::scoped_lock lock(stream.mutex);
    Operation* added = operation.release();
    done = added->done = &stream.markers.emplace_back();
    std::exchange(stream.tail, added)->next.store(added, std::memory_order_release);
  }
  stream.n_submitted.fetch_add(1, std::memory_order_release);
  wake(stream.n_submitted);
  return *done;
}

}  // namespace

void Marker::raise() {
  done_.store(1, std::memory_order_release);
  wake(done_);
}

void Marker::wait() const {
  while (!raised()) sleep_while(done_, 0);
}

std::vector<const Marker*> last_operations() {
  const Context context = current_context();
  std::vector<const Marker*> all{last_of(*null_stream(context))};
  for (const auto& stream : streams().all()) {
    if (stream->context == context) all.push_back(last_of(*stream));
  }
  return all;
}

std::size_t n_streams() { return streams().size(); }
std::size_t n_events() { return events().size(); }

Result find_stream(Stream handle, std::shared_ptr<StreamObject>* stream) {
  // 1 and 2 also name the null stream; a null stream for each thread is not offered here.
  *stream = reinterpret_cast<std::uintptr_t>(handle) <= 2 ? null_stream(current_context())
                                                          : streams().find(handle);
  if (*stream == nullptr) return kInvalidHandle;
  if ((*stream)->capturing.load(std::memory_order_relaxed)) return kCaptureUnsupported;
  return (*stream)->context->error.load(std::memory_order_relaxed);
}

const Marker& submit(StreamObject& stream, std::function<void()> run) {
  auto operation = std::make_unique<Operation>();
  operation->run = [before = implied(stream), run = std::move(run)] {
    for (const Marker* marker : before) marker->wait();
    if (run != nullptr) run();
  };
  return enqueue(stream, std::move(operation));
}

Result stream_create(Stream* stream, unsigned flags, int) {
  if (const Result refused = enter(Entry::stream_create, Needs::kContext)) return refused;
  if (flags > kStreamNonBlocking) return kInvalidValue;
  *stream = streams().add(start(current_context(), flags));
  return kSuccess;
}

Result stream_destroy(Stream handle) {
  if (const Result refused = enter(Entry::stream_destroy, Needs::kContext)) return refused;
  const auto stream = streams().remove(handle);
  if (stream == nullptr) return kInvalidHandle;
  // Its thread ends once all is done.
  auto operation = std::make_unique<Operation>();
  operation->last = true;
  enqueue(*stream, std::move(operation));
  return kSuccess;
}

Result stream_query(Stream handle) {
  if (const Result refused = enter(Entry::stream_query, Needs::kContext)) return refused;
  std::shared_ptr<StreamObject> stream;
  if (const Result refused = find_stream(handle, &stream)) return refused;
  if (!last_of(*stream)->raised()) return kNotReady;
  return stream->context->error.load(std::memory_order_relaxed);
}

Result stream_synchronize(Stream handle) {
  if (const Result refused = enter(Entry::stream_synchronize, Needs::kContext)) return refused;
  std::shared_ptr<StreamObject> stream;
  if (const Result refused = find_stream(handle, &stream)) return refused;
  submit(*stream, nullptr).wait();
  return stream->context->error.load(std::memory_order_relaxed);
}

Result stream_is_capturing(Stream handle, int* status) {
  if (const Result refused = enter(Entry::stream_is_capturing, Needs::kContext)) return refused;
  std::shared_ptr<StreamObject> stream;
  const Result found = find_stream(handle, &stream);
  *status = found == kCaptureUnsupported ? 1 : 0;
  return found == kCaptureUnsupported ? kSuccess : found;
}

Result stream_wait_event(Stream handle, Event event, unsigned flags) {
  if (const Result refused = enter(Entry::stream_wait_event, Needs::kContext)) return refused;
  std::shared_ptr<StreamObject> stream;
  if (const Result refused = find_stream(handle, &stream)) return refused;
  const auto found = events().find(event);
  if (found == nullptr) return kInvalidHandle;
  if (flags != 0) return kInvalidValue;
  const std::scoped_lock lock(found->mutex);
  if (found->recorded == nullptr) return kSuccess;
  submit(*stream, [recorded = found->recorded] { recorded->wait(); });
  return kSuccess;
}

Result event_create(Event* event, unsigned) {
  if (const Result refused = enter(Entry::event_create, Needs::kContext)) return refused;
  *event = events().add(std::make_shared<EventObject>(current_context()));
  return kSuccess;
}

Result event_record(Event event, Stream handle) {
  if (const Result refused = enter(Entry::event_record, Needs::kContext)) return refused;
  std::shared_ptr<StreamObject> stream;
  if (const Result refused = find_stream(handle, &stream)) return refused;
  const auto found = events().find(event);
  if (found == nullptr || found->context != stream->context) return kInvalidHandle;
  const std::scoped_lock lock(found->mutex);
  found->recorded = &submit(*stream, nullptr);
  return kSuccess;
}

Result event_query(Event event) {
  if (const Result refused = enter(Entry::event_query, Needs::kContext)) return refused;
  const auto found = events().find(event);
  if (found == nullptr) return kInvalidHandle;
  const std::scoped_lock lock(found->mutex);
  if (found->recorded != nullptr && !found->recorded->raised()) return kNotReady;
  return found->context->error.load(std::memory_order_relaxed);
}

Result event_synchronize(Event event) {
  if (const Result refused = enter(Entry::event_synchronize, Needs::kContext)) return refused;
  const auto found = events().find(event);
  if (found == nullptr) return kInvalidHandle;
  const Marker* recorded = nullptr;
  {
    const std::scoped_lock lock(found->mutex);
    recorded = found->recorded;
  }
  if (recorded != nullptr) recorded->wait();
  return found->context->error.load(std::memory_order_relaxed);
}

Result event_destroy(Event event) {
  if (const Result refused = enter(Entry::event_destroy, Needs::kContext)) return refused;
  return events().remove(event) == nullptr ? kInvalidHandle : kSuccess;
}

}  // namespace fake_cuda

// For tests: begins or ends a stream's capture into a graph; at the end, returns its outcome.
extern "C" __attribute__((visibility("default"))) int fakeSetCapturing(pgasdl::cuda::Stream handle,
                                                                       int capturing) {
  const auto stream = fake_cuda::streams().find(handle);
  if (stream == nullptr) return fake_cuda::kInvalidHandle;
  stream->capturing.store(capturing != 0, std::memory_order_relaxed);
  if (capturing == 0) return fake_cuda::end_capture();
  fake_cuda::begin_capture();
  return fake_cuda::kSuccess;
}

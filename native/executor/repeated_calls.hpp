// Calls of one group that come again: which executions each runs, which was interrupted, and which
// was declined.
//
// Any thread may call it, one at a time; what runs executions, only with the numbering entered.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "executor/execution.hpp"

namespace pgasdl {

// Identifies a call by its array and its arguments. Objects are compared by their addresses.
struct CallKey {
  std::uintptr_t address = 0;
  std::uint64_t extent = 0;     // elements or bytes, as the kind of array has it
  std::uint64_t format = 0;     // of an element, where a number tells it,
  const void* dtype = nullptr;  // or an object
  const void* op = nullptr;
  const void* plan = nullptr;
  bool operator==(const CallKey&) const = default;
};

// A call: executions of its parts, one after another. Its maker says which calls are the same.
class RepeatedCall {
 public:
  struct Part {
    std::shared_ptr<Execution> execution;
    Array array;  // without its place, which run() gives
  };
  // `keeps` holds what the executions need.
  RepeatedCall(std::vector<Part> parts, std::shared_ptr<const void> keeps)
      : keeps_(std::move(keeps)), parts_(std::move(parts)) {}
  RepeatedCall(const RepeatedCall&) = delete;
  RepeatedCall& operator=(const RepeatedCall&) = delete;
  virtual ~RepeatedCall() = default;

  virtual bool same(const RepeatedCall& other) const = 0;
  const std::vector<Part>& parts() const { return parts_; }

 private:
  const std::shared_ptr<const void> keeps_;  // goes after the executions
  const std::vector<Part> parts_;
};

// The thread that makes a call: how it runs an execution, and how it waits.
class Caller {
 public:
  virtual ~Caller() = default;
  // Begins it and waits, or only waits after an interruption. True: a stream makes it.
  virtual bool run(Execution& execution, const Array& array, double timeout) = 0;
  virtual void wait(Execution& execution, double timeout) = 0;
};

class RepeatedCalls {
 public:
  explicit RepeatedCalls(std::shared_ptr<Numbering> numbering) : numbering_(std::move(numbering)) {}

  Numbering& numbering() const { return *numbering_; }

  // Null: this call was not remembered.
  std::shared_ptr<const RepeatedCall> find(const CallKey& key) const {
    const auto found = calls_.find(key);
    return found == calls_.end() ? nullptr : found->second.call;
  }
  // Throws for any other call than the interrupted one.
  void admit(const RepeatedCall& call) const;
  // Runs `call`, or the rest of the interrupted one, on the array at `address`. False: some rank
  // declined it, so that nothing was reduced.
  bool run(std::shared_ptr<const RepeatedCall> call, std::uintptr_t address, double timeout,
           Caller& caller);
  // From now on find() knows the call that was run last; `keeps` holds the key's objects.
  void remember(const CallKey& key, std::shared_ptr<const void> keeps);
  void forget();
  // The call that was declined, or null; told once.
  std::shared_ptr<const RepeatedCall> take_declined() { return std::exchange(declined_, nullptr); }

 private:
  static constexpr std::size_t kMostCalls = 4096;
  struct Hash {
    std::size_t operator()(const CallKey& key) const {
      return key.address ^ (key.address >> 12) ^ (key.extent << 7) ^ key.format;
    }
  };
  struct Remembered {
    std::shared_ptr<const RepeatedCall> call;
    std::shared_ptr<const void> keeps;
  };
  void run_part(const RepeatedCall::Part& part, std::uintptr_t address, double timeout,
                Caller& caller);

  const std::shared_ptr<Numbering> numbering_;
  std::unordered_map<CallKey, Remembered, Hash> calls_;
  std::shared_ptr<const RepeatedCall> last_;
  std::shared_ptr<const RepeatedCall> interrupted_;  // and the part at which it continues
  std::size_t part_ = 0;
  std::shared_ptr<Execution> streamed_;  // the last one, if a stream takes its result
  std::shared_ptr<const RepeatedCall> declined_;
};

}  // namespace pgasdl

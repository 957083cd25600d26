#include "executor/repeated_calls.hpp"

#include <chrono>

#include "sys/error.hpp"

namespace pgasdl {

void RepeatedCalls::admit(const RepeatedCall& call) const {
  if (interrupted_ != nullptr && !interrupted_->same(call)) {
    throw Error(ErrorKind::kMismatch,
                "an allreduce of this group timed out: call it again with the same array first");
  }
}

bool RepeatedCalls::run(std::shared_ptr<const RepeatedCall> call, std::uintptr_t address,
                        double timeout, Caller& caller) {
  std::size_t number = 0;
  if (interrupted_ != nullptr) {
    admit(*call);
    call = interrupted_;
    number = part_;
  }
  const std::vector<RepeatedCall::Part>& parts = call->parts();
  const bool one = parts.size() < 2;  // saves reading the clock
  const Deadline deadline = one ? Deadline::once() : Deadline::in(timeout);
  for (std::size_t before = 0; before < number; ++before) address += parts[before].array.bytes;
  for (; number < parts.size(); ++number) {
    const RepeatedCall::Part& part = parts[number];
    const std::chrono::duration<double> left = deadline.left();
    try {
      run_part(part, address, one ? timeout : left.count(), caller);
    } catch (...) {
      const bool begun = number > 0 || part.execution->under_way();
      interrupted_ = begun && !numbering_->failed() ? call : nullptr;
      part_ = number;
      throw;
    }
    if (part.execution->declined()) {
      interrupted_ = nullptr;
      declined_ = call;
      forget();
      return false;
    }
    address += part.array.bytes;
  }
  interrupted_ = nullptr;
  last_ = std::move(call);
  return true;
}

void RepeatedCalls::run_part(const RepeatedCall::Part& part, std::uintptr_t address, double timeout,
                             Caller& caller) {
  if (streamed_ != nullptr && streamed_ != part.execution) {  // one at a time
    caller.wait(*streamed_, timeout);
  }
  streamed_ = nullptr;
  Array array = part.array;
  array.source = array.target = reinterpret_cast<std::byte*>(address);
  if (caller.run(*part.execution, array, timeout)) streamed_ = part.execution;
}

void RepeatedCalls::remember(const CallKey& key, std::shared_ptr<const void> keeps) {
  if (last_ == nullptr) return;
  if (calls_.size() >= kMostCalls) calls_.clear();
  calls_.insert_or_assign(key, Remembered{last_, std::move(keeps)});
}

void RepeatedCalls::forget() {
  calls_.clear();
  last_ = nullptr;
}

}  // namespace pgasdl

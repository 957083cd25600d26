#include "pgas/recorder.hpp"

#include <iomanip>

namespace pgasdl {

std::string_view name(Operation operation) {
  constexpr std::array<std::string_view, 18> kNames{"write",
                                                    "read",
                                                    "notify",
                                                    "write_notify",
                                                    "read_notify",
                                                    "notify_add",
                                                    "write_notify_add",
                                                    "atomic",
                                                    "waitsome",
                                                    "wait_count",
                                                    "reset",
                                                    "wait",
                                                    "barrier",
                                                    "allgather",
                                                    "passive_send",
                                                    "passive_receive",
                                                    "plan_start",
                                                    "plan_done"};
  return kNames[static_cast<std::size_t>(operation)];
}

double Recorder::seconds(std::uint64_t at) const {
  const double then = std::chrono::duration<double>(start_.time_since_epoch()).count();
  return then + (static_cast<double>(at) - static_cast<double>(start_ticks_)) * per_tick_so_far();
}

double Recorder::per_tick_so_far() const {
  const std::uint64_t now = ticks();
  const std::chrono::duration<double> elapsed = Clock::now() - start_;
  return elapsed.count() / static_cast<double>(now - start_ticks_ + 1);
}

double Recorder::seconds_per_tick() const {
  static const double kPerTick = per_tick_so_far();
  return kPerTick;
}

std::string Recorder::dump(Rank rank) const {
  const std::uint64_t now = ticks();
  const double elapsed_us =
      std::chrono::duration<double, std::micro>(Clock::now() - start_).count();
  const double us_per_tick = elapsed_us / static_cast<double>(now - start_ticks_ + 1);
  const std::uint64_t end = next_.load(std::memory_order_relaxed);
  const std::uint64_t begin = end > kRecords ? end - kRecords : 0;
  std::ostringstream out;
  out << "pgasdl rank " << rank << ": last " << end - begin << " of " << end << " operations\n";
  for (std::uint64_t index = begin; index < end; ++index) {
    const Record& record = records_[index % kRecords];
    const std::uint64_t what = record.what.load(std::memory_order_relaxed);
    const std::uint64_t then = record.ticks.load(std::memory_order_relaxed);
    const double age = now > then ? static_cast<double>(now - then) * us_per_tick : 0;
    const auto peer = static_cast<Rank>(static_cast<std::uint32_t>(what));
    const bool long_ago = age >= 1e6;
    out << std::setw(14) << std::fixed << std::setprecision(long_ago ? 3 : 1)
        << -age / (long_ago ? 1e6 : 1) << (long_ago ? " s   " : " us  ")
        << name(static_cast<Operation>(what >> 56));
    if (peer >= 0) out << " peer " << peer;
    out << " segment " << ((what >> 32) & 0xffffff) << " id "
        << static_cast<std::int64_t>(record.detail.load(std::memory_order_relaxed));
    out << " bytes " << record.bytes.load(std::memory_order_relaxed) << '\n';
  }
  return out.str();
}

}  // namespace pgasdl

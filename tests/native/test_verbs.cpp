// The verbs transport on a real device, with ranks as threads of this process. Without a device the
// test reports that and succeeds: tests/softroce boots a machine that has one.

#include <atomic>

#include "unmapped.hpp"
#include "verbs.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

Settings over_verbs(VerbsOptions verbs = {}, std::uint32_t queues = Options{}.queues) {
  Settings settings;
  settings.options.queues = queues;
  verbs.queues = settings.options.queues + Context::kOwnQueues;
  settings.transport = [verbs](Rank rank, Rank size) {
    return std::make_unique<VerbsTransport>(rank, size, kToken, verbs);
  };
  return settings;
}

VerbsOptions completion_first(std::uint32_t requests) {
  VerbsOptions options = depth(requests);
  options.order = VerbsOrder::kCompletion;
  return options;
}

// For many ranks in a guest, whose only processor may be busy with other work for seconds.
Settings patiently(VerbsOptions verbs) {
  verbs.timeout_s = 20;
  Settings settings = over_verbs(verbs);
  settings.options.stopped_after = verbs.timeout_s;
  return settings;
}

// The requested device is chosen, or refused with the reason.
void choice() {
  const auto best = verbs_devices();
  CHECK(std::count_if(best.begin(), best.end(), [](const auto& info) { return info.chosen; }) == 1);
  for (const VerbsDeviceInfo& info : best) CHECK(info.chosen == info.refused.empty());
  VerbsOptions options;
  options.ports = {{best.back().device, best.back().port}};
  options.gid_index = best.back().gid_index;
  if (best.back().state == best.front().state) {
    const auto last = verbs_devices(options);
    CHECK(last[0].chosen && last[0].gid == best.back().gid);
    CHECK(last.size() == best.size());
  }
  options.ports = {{"nonesuch", 0}};
  for (const VerbsDeviceInfo& info : verbs_devices(options)) {
    CHECK(!info.chosen && info.refused == "device nonesuch was asked for");
  }
  require_error(ErrorKind::kUnavailable, [&] { VerbsTransport none(0, 1, kToken, options); });
}

// No setting has its default.
VerbsOptions unusual() {
  VerbsOptions options;
  options.pkey = 0x7fff;
  options.mtu = 512;
  options.service_level = 3;
  options.traffic_class = 104;
  options.global_routes = true;
  options.retry_count = 5;
  options.rnr_retry_count = 4;
  options.ack_timeout = 16;
  options.inline_bytes = 256;
  return options;
}
// Two ranks ask each other for a thousand connections before the first one exists. The last answer
// comes long after the time for which a silent peer is lost; no connection is given up.
void all_at_once() {
  constexpr std::uint32_t kQueues = 1000;
  run(2, over_verbs({}, kQueues), [&](Local& local) {
    const auto segment = local.segment(8, kQueues);
    const Rank peer = local.peer(1);
    const Deadline deadline = Deadline::in(150);
    std::vector<QueueId> queues(kQueues, 0);
    for (QueueId& queue : std::span(queues).subspan(1)) queue = local.context.queue_create();
    local.barrier();
    while (!queues.empty() && !deadline.passed()) {
      std::erase_if(queues, [&](QueueId queue) {
        return local.context.notify(peer, *segment, queue, 1, queue, Deadline::once()) ==
               Outcome::kDone;
      });
    }
    CHECK_NOTE(queues.empty(), "%zu connections are not there", queues.size());
    for (QueueId queue = 0; queue < kQueues; ++queue) {
      std::uint32_t found = 0;
      CHECK(local.context.notify_waitsome(*segment, queue, 1, deadline, found) == Outcome::kDone);
      CHECK(local.context.transport().connections(queue) == 1);
    }
    CHECK(local.world().barrier(deadline) == Outcome::kDone);
  });
}

}  // namespace

int main() {
  if (!have_device()) return 0;
  step("choice", choice);
  step("flags", [] { flag_is_last(over_verbs(), 3, 512, 40); });
  step("flags, shallow", [] { flag_is_last(over_verbs(depth(8)), 2, 20000, 10); });
  step("lists", [] { lists_and_reads(over_verbs(), 40); });
  step("long lists", [] { lists_and_reads(over_verbs(depth(8)), 500); });
  step("beats", [] { beats_are_lost(over_verbs(), 60); });
  step("many", [] { many_in_flight(over_verbs(depth(8)), 300); });
  step("away", [] { away(over_verbs(as_messages())); });
  step("away, counted", [] { away(over_verbs()); });
  step("settings", [] { flag_is_last(over_verbs(unusual()), 2, 20000, 5); });
  step("plans", [] { plans(over_verbs(), 3, false); });
  step("plans, thread", [] { plans(over_verbs(depth(8)), 2, true); });
  step("relayed", [] { relayed(patiently({})); });
  step("all at once", all_at_once);
  const auto held = [](std::uint32_t requests) { return over_verbs(completion_first(requests)); };
  step("held: flags", [&] { flag_is_last(held(127), 3, 512, 20); });
  step("shallow", [&] { flag_is_last(held(8), 2, 20000, 10); });
  step("long lists", [&] { lists_and_reads(held(8), 500); });
  step("many", [&] { many_in_flight(held(8), 300); });
  step("away", [&] { away(over_verbs(as_messages(completion_first(127)))); });
  step("away, counted", [&] { away(held(127)); });
  step("plans, thread", [&] { plans(held(8), 2, true); });
  step("relayed", [&] { relayed(patiently(completion_first(127))); });
  std::puts("ok");
}

// Replays plans on SimGrid: one actor for each lane, one mailbox for each notification.
// Reads what test_simulate_simgrid.py writes:
//   ranks R                    rank r runs on the platform's host h<r>
//   lane RANK N                then N steps: "put PEER NOTE BYTES", "wait NOTE", "work SECONDS",
//                              "flush"
// With a third argument "turns", a rank's messages leave one after the other; else together.
// Prints the moment at which each rank's last lane is done.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <simgrid/s4u.hpp>
#include <string>
#include <vector>

namespace sg4 = simgrid::s4u;

struct Step {
  std::string what;
  int peer = 0, note = 0;
  double amount = 0;
};

static std::vector<double> ended;
static std::vector<sg4::MutexPtr> ports;
static bool in_turn = false;
static int token = 1;

static sg4::Mailbox* box(int rank, int note) {
  return sg4::Mailbox::by_name(std::to_string(rank) + "/" + std::to_string(note));
}

static void run_lane(int rank, std::vector<Step> steps) {
  std::vector<sg4::CommPtr> sending;
  std::vector<sg4::ActorPtr> waiting;
  for (const Step& step : steps) {
    if (step.what == "put" && in_turn) {
      const auto send = [rank, step] {
        ports[rank]->lock();
        box(step.peer, step.note)->put(&token, static_cast<uint64_t>(step.amount));
        ports[rank]->unlock();
      };
      waiting.push_back(sg4::Actor::create("port", sg4::this_actor::get_host(), send));
    } else if (step.what == "put") {
      sending.push_back(
          box(step.peer, step.note)->put_async(&token, static_cast<uint64_t>(step.amount)));
    } else if (step.what == "wait") {
      box(rank, step.note)->get<int>();
    } else if (step.what == "work") {
      sg4::this_actor::sleep_for(step.amount);
    } else {
      for (const auto& one : sending) one->wait();
      for (const auto& one : waiting) one->join();
      sending.clear();
      waiting.clear();
    }
  }
  ended[rank] = std::max(ended[rank], sg4::Engine::get_clock());
  for (const auto& one : sending) one->wait();  // not part of the plan: SimGrid wants it
}

int main(int argc, char** argv) {
  sg4::Engine engine(&argc, argv);
  engine.load_platform(argv[1]);
  std::ifstream in(argv[2]);
  std::string word;
  int ranks = 0, rank = 0, count = 0;
  in >> word >> ranks;
  ended.assign(ranks, 0.0);
  in_turn = argc > 3 && std::string(argv[3]) == "turns";
  for (int port = 0; port < ranks; ++port) ports.push_back(sg4::Mutex::create());
  while (in >> word >> rank >> count) {
    std::vector<Step> steps(count);
    for (Step& step : steps) {
      in >> step.what;
      if (step.what == "put") in >> step.peer >> step.note >> step.amount;
      if (step.what == "wait") in >> step.note;
      if (step.what == "work") in >> step.amount;
    }
    const auto lane = sg4::Actor::create(
        "lane", sg4::Host::by_name("h" + std::to_string(rank)), run_lane, rank, steps);
    // Bytes move whether or not anybody waits for them yet, as in memory.
    for (const Step& step : steps) {
      if (step.what == "wait") box(rank, step.note)->set_receiver(lane);
    }
  }
  engine.run();
  for (const double end : ended) std::printf("%.12g\n", end);
  return 0;
}

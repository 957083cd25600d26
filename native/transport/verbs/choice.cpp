#include "transport/verbs/choice.hpp"

#include <algorithm>
#include <tuple>

namespace pgasdl {
namespace {

constexpr int kLocal = 10;  // the kernel's distance of a node from itself

bool same_port(const VerbsDeviceInfo& a, const VerbsDeviceInfo& b) {
  return a.device == b.device && a.port == b.port;
}

int kind_of(const VerbsCandidate& candidate) {
  return candidate.gid.link == VerbsLink::kRoceV1 ? 0 : 1;
}

// The merits of an address, most important first; the same on all machines of one kind.
auto merit_of(const VerbsCandidate& candidate) {
  return std::tuple(kind_of(candidate), candidate.scope, candidate.info.gigabits);
}

bool goes_before(const VerbsCandidate& a, const VerbsCandidate& b) {
  if (a.info.refused.empty() != b.info.refused.empty()) return a.info.refused.empty();
  if (merit_of(a) != merit_of(b)) return merit_of(a) > merit_of(b);
  return std::tie(a.info.device, a.info.port) < std::tie(b.info.device, b.info.port);
}

bool same_subnet(const VerbsCandidate& a, const VerbsCandidate& b) {
  return a.subnet.empty() || b.subnet.empty() ? same_port(a.info, b.info) : a.subnet == b.subnet;
}

int distance_to(const VerbsCandidate& port, const VerbsOptions& options) {
  const auto node = static_cast<std::size_t>(port.info.numa_node);
  return node < options.distances.size() ? options.distances[node] : kLocal;
}

using Ports = std::vector<VerbsCandidate*>;

// The best address of each port of one kind of link.
Ports ports_in(std::vector<VerbsCandidate>& found) {
  Ports ports;
  for (VerbsCandidate& candidate : found) {
    if (!candidate.info.refused.empty() || candidate.gid.link != found[0].gid.link) continue;
    const bool known = std::any_of(ports.begin(), ports.end(), [&](const VerbsCandidate* port) {
      return same_port(port->info, candidate.info);
    });
    if (!known) ports.push_back(&candidate);
  }
  return ports;
}

std::vector<Ports> by_subnet(const Ports& ports) {
  std::vector<Ports> subnets;
  for (VerbsCandidate* port : ports) {
    const auto mine = std::find_if(subnets.begin(), subnets.end(), [&](const Ports& subnet) {
      return same_subnet(*subnet[0], *port);
    });
    if (mine == subnets.end()) {
      subnets.push_back({port});
    } else {
      mine->push_back(port);
    }
  }
  return subnets;
}

// Puts the nearest ports of a subnet first and returns their number.
std::size_t put_nearest_first(Ports& subnet, const VerbsOptions& options) {
  std::stable_sort(subnet.begin(), subnet.end(),
                   [&](const VerbsCandidate* a, const VerbsCandidate* b) {
                     return distance_to(*a, options) < distance_to(*b, options);
                   });
  const auto end = std::find_if(subnet.begin(), subnet.end(), [&](const VerbsCandidate* port) {
    return distance_to(*port, options) != distance_to(*subnet[0], options);
  });
  return static_cast<std::size_t>(end - subnet.begin());
}

// All ports, in the order in which rails take them.
Ports in_order(Ports ports, const VerbsOptions& options) {
  Ports order;
  while (!ports.empty()) {
    const auto lesser = std::stable_partition(
        ports.begin(), ports.end(), [best = merit_of(*ports[0])](const VerbsCandidate* port) {
          return merit_of(*port) == best;
        });
    std::vector<Ports> subnets = by_subnet({ports.begin(), lesser});
    const std::size_t n_each = (options.rails + subnets.size() - 1) / subnets.size();
    for (Ports& subnet : subnets) {
      const std::size_t n = put_nearest_first(subnet, options);
      for (std::size_t i = 0; i < n && order.empty() && &subnet == subnets.data(); ++i) {
        subnet[i]->info.turn = static_cast<int>(i);
      }
      const auto begin = subnet.begin();
      std::rotate(begin, begin + static_cast<std::ptrdiff_t>(options.turn * n_each % n),
                  begin + static_cast<std::ptrdiff_t>(n));
    }
    const std::size_t end = order.size() + static_cast<std::size_t>(lesser - ports.begin());
    for (std::size_t round = 0; order.size() < end; ++round) {
      for (const Ports& subnet : subnets) {
        if (round < subnet.size()) order.push_back(subnet[round]);
      }
    }
    ports.erase(ports.begin(), lesser);
  }
  return order;
}

// Why the second of two usable addresses is not used.
std::string ranked_below(const VerbsCandidate& best, const VerbsCandidate& other,
                         const VerbsOptions& options) {
  if (kind_of(other) < kind_of(best)) return "it is RoCE v1, which is not routed";
  const bool one_port = same_port(best.info, other.info);
  const std::string index = text("GID index ", best.info.gid_index);
  const std::string than = one_port ? index + "'s" : best.info.device;
  if (other.scope < best.scope) return text("its address reaches less far than ", than);
  if (one_port) return text(index, " comes first");
  if (other.info.gigabits < best.info.gigabits) return text("it is slower than ", than);
  if (other.gid.link != best.gid.link) return text(than, " comes first");
  if (!same_subnet(best, other)) return text("it is in another subnet than ", than);
  if (distance_to(other, options) > distance_to(best, options)) {
    return text("it is on a farther NUMA node than ", than);
  }
  return "it is another rank's turn";
}

}  // namespace

void choose(std::vector<VerbsCandidate>& found, const VerbsOptions& options) {
  std::stable_sort(found.begin(), found.end(), goes_before);
  if (found.empty() || !found[0].info.refused.empty()) return;
  Ports order = in_order(ports_in(found), options);
  order.resize(std::min<std::size_t>(order.size(), options.rails));
  std::vector<VerbsCandidate> chosen;
  for (VerbsCandidate* port : order) {
    port->info.chosen = true;
    chosen.push_back(*port);
  }
  std::erase_if(found, [](const VerbsCandidate& candidate) { return candidate.info.chosen; });
  for (VerbsCandidate& other : found) {
    if (!other.info.refused.empty()) continue;
    // Other addresses of a chosen port are compared with the one in use.
    const auto own = std::find_if(chosen.begin(), chosen.end(), [&](const VerbsCandidate& port) {
      return same_port(port.info, other.info);
    });
    other.info.refused = ranked_below(own == chosen.end() ? chosen[0] : *own, other, options);
  }
  found.insert(found.begin(), chosen.begin(), chosen.end());
}

}  // namespace pgasdl

// What ranks spend their time on, from two records of each: the last one, and an earlier one or 0.

/** The differences of a rank's last record and of an earlier one, or what it counted in all. */
function between(records, wholeRun) {
  const last = records.at(-1);
  const before = wholeRun || records.length < 2 ? null : records[0];
  const less = (numbers, earlier) => numbers.map((n, at) => n - (earlier?.[at] ?? 0));
  const difference = (part) => Object.fromEntries(Object.entries(last[part]).map(
    ([key, numbers]) => [key, less(numbers, before?.[part][key])]));
  return {
    rank: last.rank,
    iteration: last.iteration,
    memory: last.memory,
    losses: last.losses,
    seconds: before && last.time - before.time,
    iterations: before && last.iteration - before.iteration,
    peers: difference("peers"),
    layers: difference("layers"),
  };
}

const sum = (numbers) => numbers.reduce((total, n) => total + n, 0);
const mean = (numbers) => (numbers.length ? sum(numbers) / numbers.length : null);

/** One rank's layers: seconds of one iteration, by what they were spent on. */
function perIteration([times, computing, queued, exchanging, waiting]) {
  const each = (n) => (times > 0 ? n / times : 0);
  return {
    computing: each(computing), queued: each(queued), exchanging: each(exchanging),
    waiting: each(waiting),
  };
}

/**
 * Of a job's ranks: rates by rank, layers' times, and bytes by link.
 * `seconds`: the time that they are of; null: the whole run.
 */
export function rates(ranks, ended) {
  const wholeRun = ended || [...ranks.values()].some((records) => records.length < 2);
  const found = [...ranks.values()].map((records) => between(records, wholeRun));
  found.sort((a, b) => a.rank - b.rank);
  for (const each of found) {
    const layers = Object.values(each.layers);
    // Between the calls for layers it computes: both together are the time of the loop.
    const computing = sum(layers.map((layer) => layer[1]));
    const waiting = sum(layers.map((layer) => layer[4]));
    each.waitingShare = computing + waiting > 0 ? waiting / (computing + waiting) : null;
    // Bytes of the whole run, or in a second.
    each.links = Object.entries(each.peers).map(([peer, [written, , read]]) => ({
      rank: each.rank, peer: Number(peer),
      written: written / (each.seconds ?? 1), read: read / (each.seconds ?? 1),
    }));
    each.written = sum(each.links.map((link) => link.written));
    each.read = sum(each.links.map((link) => link.read));
  }
  const names = [...new Set(found.flatMap((each) => Object.keys(each.layers)))];
  const layers = names.map((name) => {
    const times = found.filter((each) => each.layers[name]).map((each) => perIteration(each.layers[name]));
    const of = (what) => mean(times.map((each) => each[what]));
    return { name, computing: of("computing"), exchanging: of("exchanging"), waiting: of("waiting") };
  });
  const links = found.flatMap((each) => each.links);
  const span = wholeRun ? null : mean(found.map((each) => each.seconds));
  return { seconds: span, ranks: found, layers, links, late: lateRank(found) };
}

/** The rank for which the others wait: it waits least, and they clearly more. */
function lateRank(ranks) {
  const known = ranks.filter((each) => each.waitingShare !== null);
  if (known.length < 2) return null;
  const last = known.reduce((a, b) => (b.waitingShare < a.waitingShare ? b : a));
  const others = mean(known.filter((each) => each !== last).map((each) => each.waitingShare));
  return others - last.waitingShare > 0.05 ? { rank: last.rank, share: others } : null;
}

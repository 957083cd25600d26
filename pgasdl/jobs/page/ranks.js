// What the ranks of a job do: who is late, time by layer, bytes by link.
import { bytes, make, percent, seconds, section, short, table } from "./words.js";
import { rates } from "./rates.js";

/** The sections of one job; none where its ranks told nothing. */
export function ranksOf(watched) {
  if (!watched.ranks.size) return [];
  const found = rates(watched.ranks, watched.ended);
  const span = found.seconds === null ? "in the whole run" : `in the last ${seconds(found.seconds)}`;
  return [
    section("Ranks", lateness(found), rankTable(found), ...missing(watched)),
    ...(found.layers.length ? [section("Layers", note(`Mean of all ranks ${span}, of one iteration. `
      + "Exchanges go on while the program computes; only waiting costs time."), layerTable(found))] : []),
    ...(found.links.length ? [section("Links", note(`Bytes ${span}, from the rank of the row to and from the memory of the column's.`), linkTable(found))] : []),
  ];
}

const traffic = (n, span) => (span === null ? bytes(n) : `${bytes(n)}/s`);
const note = (text) => make("p", { class: "note" }, text);

function missing({ ranks, job }) {
  const text = `Of ${job.request.ranks} ranks, ${ranks.size} are shown.`;
  return ranks.size < job.request.ranks ? [note(text)] : [];
}

function lateness({ late, ranks }) {
  if (ranks.length < 2) return "";
  const text = late
    ? `Rank ${late.rank} is late: the others spend ${percent(late.share)} of their time waiting.`
    : "No rank is late.";
  return make("p", { class: late ? "late" : "note" }, text);
}

function rankTable({ ranks, late, seconds: span }) {
  const rate = (each) => (each.seconds ? short(each.iterations / each.seconds) : "–");
  const sent = (n) => traffic(n, span);
  return table(
    ["#rank", "#iteration", "#iterations/s", "#waiting", "#written", "#read", "#memory", "#losses"],
    ranks.map((each) => [
      each.rank === late?.rank ? make("strong", { class: "late" }, `${each.rank} late`) : String(each.rank),
      String(each.iteration), rate(each),
      each.waitingShare === null ? "–" : percent(each.waitingShare),
      sent(each.written), sent(each.read), bytes(each.memory), String(each.losses),
    ]));
}

function bar(value, most, kind) {
  const width = most > 0 ? Math.max(1, Math.round((100 * value) / most)) : 0;
  const meter = make("span", { class: `bar ${kind}`, "aria-hidden": "true" });
  meter.style.width = `${width}%`;
  return make("span", { class: "measure" }, make("span", { class: "room" }, meter), make("span", {}, seconds(value)));
}

function layerTable({ layers }) {
  const kinds = ["computing", "exchanging", "waiting"];
  const most = Math.max(...layers.flatMap((layer) => kinds.map((kind) => layer[kind])));
  const several = new Set(layers.map((layer) => layer.name.split("/")[0])).size > 1;
  return table(["#layer", ...kinds], layers.map((layer) => [
    several ? layer.name : layer.name.split("/")[1],
    ...kinds.map((kind) => bar(layer[kind], most, kind)),
  ]));
}

function linkTable({ links, ranks, seconds: span }) {
  const numbers = [...new Set([...ranks.map((each) => each.rank), ...links.map((link) => link.peer)])].sort((a, b) => a - b);
  const of = new Map(links.map((link) => [`${link.rank} ${link.peer}`, link.written + link.read]));
  const most = Math.max(...of.values());
  const cell = (rank, peer) => {
    const n = of.get(`${rank} ${peer}`) ?? 0;
    const found = make("td", { class: "link", title: `${rank} → ${peer}: ${traffic(n, span)}` }, numbers.length > 8 || n === 0 ? "" : traffic(n, span));
    found.style.setProperty("--share", most > 0 ? n / most : 0);
    return found;
  };
  return make("div", { class: "scrolls" }, make("table", { class: "links" },
    make("thead", {}, make("tr", {}, make("th", {}, "rank"), numbers.map((peer) => make("th", {}, String(peer))))),
    make("tbody", {}, ranks.map(({ rank }) => make("tr", {}, make("th", {}, String(rank)), numbers.map((peer) => cell(rank, peer)))))));
}

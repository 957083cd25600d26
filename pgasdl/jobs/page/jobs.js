// The list of jobs, and the head of each chosen one.
import { colour } from "./charts.js";
import { make, moment, seconds, short, table } from "./words.js";

const state = (job) => make("span", { class: `state ${job.state}` }, job.state);

function took(job) {
  if (job.started === null) return "–";
  return seconds(Math.max(0, (job.ended ?? Date.now() / 1000) - job.started));
}

/** The list; `choose(ids)` is called with those that are to be shown. */
export function jobList(jobs, chosen, choose, older) {
  const rows = jobs.map((job) => {
    const isChosen = chosen.includes(job.id);
    const box = make("input", {
      type: "checkbox", checked: isChosen, "aria-label": `show job ${job.id} beside others`,
      onchange: () => choose(isChosen ? chosen.filter((id) => id !== job.id) : [...chosen, job.id]),
    });
    const link = make("a", { href: `#jobs=${job.id}` }, job.name);
    if (isChosen) link.setAttribute("aria-current", "true");
    return [box, String(job.id), link, state(job), String(job.request.ranks), took(job)];
  });
  if (!rows.length) return make("p", { class: "note" }, "There are no jobs: ", make("code", {}, "pgasdl job submit PROGRAM.py"));
  const more = older ? [make("button", { onclick: older }, "Older jobs")] : [];
  return make("div", {}, table(["", "#job", "name", "state", "#ranks", "#took"], rows), ...more);
}

function rate(watched) {
  const [records] = watched.ranks.values();
  if (watched.ended || !records || records.length < 2) return [];
  const [first, last] = [records[0], records.at(-1)];
  const rate = (last.iteration - first.iteration) / (last.time - first.time);
  return [["iterations/s", short(rate)]];
}

/** What a job is, and how it stands. */
export function jobHead(watched, place, several) {
  const { job } = watched;
  const iteration = Math.max(-1, ...[...watched.ranks.values()].map((records) => records.at(-1).iteration));
  const facts = [
    ["state", make("span", {}, state(job), job.reason ? `: ${job.reason}` : "")],
    ...(job.status === null ? [] : [["status", String(job.status)]]),
    ...(iteration < 0 ? [] : [["iteration", String(iteration)]]),
    ...rate(watched),
    ["program", make("code", {}, job.request.program.join(" "))],
    ["ranks", String(job.request.ranks)],
    ["started", job.started === null ? "–" : moment(job.started)],
    ["took", took(job)],
    ...(job.request.restarts ? [["restarts left", String(job.restarts_left)]] : []),
  ];
  const mark = make("span", { class: "mark", "aria-hidden": "true" });
  mark.style.background = colour(place);
  return make("section", { class: "head" },
    make("h2", {}, ...(several ? [mark] : []), `${job.id} ${job.name}`),
    make("dl", {}, ...facts.map(([name, fact]) => make("div", {}, make("dt", {}, name), make("dd", {}, fact)))));
}

// A job that is looked at: what is known of it, and how that is brought up to date.
import { get, logEnd } from "./api.js";

const POINTS = 1000; // of a metric, when it is loaded
const WHOLE = 20_000; // milliseconds until all are loaded again: thinned, without what a restart undid
const LOG_BYTES = 1 << 16; // of its end
const SPAN = 10; // seconds over which rates are told while it runs
// Names are a program's own: "constructor" is one, and nothing else has it.
const byName = (entries) => Object.assign(Object.create(null), entries);
const ENDED = ["done", "failed", "stopped", "lost"];

export class Watched {
  constructor(id) {
    this.id = id;
    this.job = null;
    this.metrics = byName({}); // by name: points of iteration, value and time
    this.wholeUntil = 0; // when they are loaded as a whole again, by performance.now()
    this.ranks = new Map(); // by rank: its records of the last seconds, the newest last
    this.history = [];
    this.records = [];
    this.log = { offset: 0, text: "", size: -1 };
  }

  get ended() { return ENDED.includes(this.job.state); }

  /** Everything: when it is chosen, has changed its state, or the server came back. */
  async load() {
    const ask = (what) => get(`/jobs/${this.id}${what}`);
    this.wholeUntil = 0;
    const [job, history, records] = await Promise.all([
      ask(""), ask("/history"), ask("/records"), this.loadReports(),
    ]);
    Object.assign(this, { job, history: history.events, records: records.records });
    if (!this.ended) this.wholeUntil = 0; // its first report may replace what a run before told
    await this.loadLog(history.log);
  }

  /** What a report may have brought. */
  async loadReports() {
    await Promise.all([this.loadMetrics(), this.loadRanks()]);
  }

  async loadMetrics() {
    const ask = (query) => get(`/jobs/${this.id}/metrics?${query}`);
    const whole = performance.now() > this.wholeUntil;
    const first = Math.max(0, ...Object.values(this.metrics).map((points) => points.at(-1)[0]));
    const fresh = await ask(whole ? `points=${POINTS}` : `first=${first}&points=${POINTS}`);
    if (whole) {
      this.wholeUntil = performance.now() + WHOLE;
      this.metrics = byName(fresh);
      return;
    }
    for (const [name, points] of Object.entries(fresh)) {
      const known = (this.metrics[name] ??= []);
      const last = known.at(-1)?.[0] ?? -1;
      known.push(...points.filter((point) => point[0] > last));
      if (!known.length) delete this.metrics[name];
    }
  }

  async loadRanks() {
    for (const record of (await get(`/jobs/${this.id}/ranks`)).ranks) {
      const kept = this.ranks.get(record.rank) ?? [];
      const last = kept.at(-1);
      if (last && last.time === record.time) continue;
      // Another run begins to count anew; and a clock may go back.
      const goesOn = last && last.iteration <= record.iteration && last.time < record.time;
      const recent = goesOn ? kept.filter((each) => each.time >= record.time - SPAN) : [];
      this.ranks.set(record.rank, [...recent, record]);
    }
  }

  async loadLog(size) {
    if (size === this.log.size) return;
    this.log = { ...(await logEnd(this.id, size, LOG_BYTES)), size };
  }
}

// A job that is looked at: what is known of it, and how that is brought up to date.
import { get, logEnd } from "./api.js";

const POINTS = 1000; // of a metric, when it is loaded
const MOST_POINTS = 4 * POINTS; // then it is loaded again, thinned
const LOG_BYTES = 1 << 16; // of its end
const SPAN = 10; // seconds over which rates are told while it runs
const ENDED = ["done", "failed", "stopped", "lost"];

export class Watched {
  constructor(id) {
    this.id = id;
    this.job = null;
    this.metrics = {}; // by name: points of iteration, value and time
    this.ranks = new Map(); // by rank: its records of the last seconds, the newest last
    this.history = [];
    this.records = [];
    this.log = { offset: 0, text: "", size: -1 };
  }

  get ended() { return ENDED.includes(this.job.state); }

  /** Everything: when it is chosen, has changed its state, or the server came back. */
  async load() {
    const ask = (what) => get(`/jobs/${this.id}${what}`);
    const [job, metrics, history, records] = await Promise.all([
      ask(""), ask(`/metrics?points=${POINTS}`), ask("/history"), ask("/records"), this.loadRanks(),
    ]);
    Object.assign(this, { job, metrics, history: history.events, records: records.records });
    await this.loadLog(history.log);
  }

  /** What a report may have brought. */
  async loadReports() {
    const ends = Object.values(this.metrics).map((points) => points.at(-1)?.[0] ?? -1);
    const first = ends.length ? Math.min(...ends) + 1 : 0;
    const [fresh] = await Promise.all([
      get(`/jobs/${this.id}/metrics?first=${first}&points=${MOST_POINTS}`), this.loadRanks(),
    ]);
    for (const [name, points] of Object.entries(fresh)) {
      const known = (this.metrics[name] ??= []);
      const last = known.at(-1)?.[0] ?? -1;
      known.push(...points.filter((point) => point[0] > last));
    }
    if (Object.values(this.metrics).some((points) => points.length > MOST_POINTS)) {
      this.metrics = await get(`/jobs/${this.id}/metrics?points=${POINTS}`);
    }
  }

  async loadRanks() {
    for (const record of (await get(`/jobs/${this.id}/ranks`)).ranks) {
      const kept = this.ranks.get(record.rank) ?? [];
      const last = kept.at(-1);
      if (last && last.time >= record.time) continue;
      // Another run begins to count anew.
      const goesOn = last && last.iteration <= record.iteration;
      const recent = goesOn ? kept.filter((each) => each.time >= record.time - SPAN) : [];
      this.ranks.set(record.rank, [...recent, record]);
    }
  }

  async loadLog(size) {
    if (size === this.log.size) return;
    this.log = { ...(await logEnd(this.id, size, LOG_BYTES)), size };
  }
}

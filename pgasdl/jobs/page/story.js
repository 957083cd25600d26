// What happened to a job, what its programs wrote, and what its ranks did before they failed.
import { make, moment, section, table } from "./words.js";

function what(event) {
  if (event.event === "state") return [event.state, event.reason].filter(Boolean).join(": ");
  if (event.event === "command") return `command ${event.name}${event.value === null ? "" : ` ${JSON.stringify(event.value)}`}`;
  return `${event.name} ${event.text}`.trim() + ` (iteration ${event.iteration})`;
}

export class Story {
  constructor() {
    this.events = section("Events");
    this.log = make("pre", { tabIndex: 0, "aria-label": "Log" });
    this.before = make("p", { class: "note" });
    this.logSection = section("Log", this.before, this.log);
    this.records = section("Flight records");
    this.element = make("div", {}, this.logSection, this.records, this.events);
  }

  show(watched) {
    const rows = watched.history.slice(-100).reverse().map((event) => [moment(event.time), what(event)]);
    this.events.replaceChildren(this.events.firstChild, table(["time", "event"], rows));
    this.showLog(watched);
    const open = new Set([...this.records.querySelectorAll("details[open]")].map((each) => each.dataset.name));
    this.records.hidden = watched.records.length === 0;
    this.records.replaceChildren(this.records.firstChild, ...watched.records.map((record) => make(
      "details", { "data-name": record.name, open: open.has(record.name) },
      make("summary", {}, `${record.name}, ${moment(record.time)}`), make("pre", {}, record.text))));
  }

  showLog({ id, log }) {
    this.before.textContent = log.offset > 0 ? `The last ${log.size - log.offset} bytes; pgasdl job log ${id} has all.` : "";
    if (this.log.textContent === log.text) return;
    const atEnd = this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 8;
    const other = this.shown !== id;
    this.shown = id;
    this.log.textContent = log.text;
    if (atEnd || other) this.log.scrollTop = this.log.scrollHeight;
  }
}

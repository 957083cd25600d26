// The metrics of the chosen jobs, one chart for each name, all jobs in it.
import { make, seconds, section, short, table } from "./words.js";

const PREFERRED = ["loss", "accuracy"];
const HEIGHT = 220;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const N_COLOURS = 8;

export const colour = (place) => css(`--line-${place % N_COLOURS}`); // of a job among the chosen

/** When a job began: one that was started again told its first points earlier. */
const startOf = ({ job }, points) => Math.min(job.started ?? Infinity, points[0][2]);

/** What the charts show of each job along the axis: iterations, or seconds since its start. */
function columns(watched, name, byTime) {
  const points = watched.metrics[name] ?? [];
  const start = points.length ? startOf(watched, points) : 0;
  return [points.map((point) => (byTime ? point[2] - start : point[0])), points.map((point) => point[1])];
}

/** When a metric came to a value for the first time: its iteration, and seconds since the start. */
export function reached(watched, name, value) {
  const points = (watched.metrics[name] ?? []).filter((point) => point[1] !== null);
  if (!points.length) return null;
  const rises = points[0][1] < value;
  const found = points.find((point) => (rises ? point[1] >= value : point[1] <= value));
  return found ? { iteration: found[0], seconds: found[2] - startOf(watched, points) } : null;
}

export class Charts {
  constructor() {
    this.plots = new Map(); // by name: the plot, and its place
    this.byTime = false;
    this.box = make("div", { class: "charts" });
    this.reach = make("div");
    this.chosen = [];
    const redraw = () => { this.drop(); this.show(this.chosen); };
    const axis = make("select", {
      id: "axis", onchange: (event) => { this.byTime = event.target.value === "time"; redraw(); },
    }, make("option", { value: "iteration" }, "iteration"), make("option", { value: "time" }, "time since the start"));
    this.metric = make("select", { id: "metric", onchange: () => this.showReach() });
    this.value = make("input", { id: "value", type: "number", step: "any", size: 8, placeholder: "value", oninput: () => this.showReach() });
    this.element = section("Metrics",
      make("p", { class: "choice" }, make("label", { for: "axis" }, "By "), axis),
      this.box,
      make("p", { class: "choice" }, make("label", { for: "metric" }, "Time to "), this.metric, " ", make("label", { for: "value", class: "hidden" }, "of the value "), this.value),
      this.reach);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    new ResizeObserver(() => this.resize()).observe(this.box);
  }

  drop() {
    for (const { plot } of this.plots.values()) plot.destroy();
    this.plots.clear();
    this.box.replaceChildren();
  }

  show(chosen) {
    const key = (list) => list.map((each) => each.id).join();
    if (key(chosen) !== key(this.chosen)) this.drop();
    this.chosen = chosen;
    const names = [...new Set(chosen.flatMap((each) => Object.keys(each.metrics)))];
    const place = (name) => (PREFERRED.includes(name) ? PREFERRED.indexOf(name) : PREFERRED.length);
    names.sort((a, b) => place(a) - place(b) || a.localeCompare(b));
    for (const name of this.plots.keys()) if (!names.includes(name)) { this.drop(); break; }
    for (const name of names) {
      const data = uPlot.join(chosen.map((each) => columns(each, name, this.byTime)));
      if (this.plots.has(name)) this.plots.get(name).plot.setData(data);
      else this.plots.set(name, this.plot(name, data));
    }
    this.element.hidden = names.length === 0;
    this.showNames(names);
    this.showReach();
  }

  plot(name, data) {
    const grid = { stroke: css("--grid"), width: 1 };
    const axis = { stroke: css("--quiet"), grid, ticks: grid, font: "12px system-ui, sans-serif" };
    const box = make("figure", {}, make("figcaption", {}, name));
    this.box.append(box);
    const options = {
      width: this.width(), height: HEIGHT, cursor: { y: false }, legend: { live: true },
      scales: { x: { time: false } },
      axes: [
        { ...axis, values: (_, splits) => splits.map((n) => (n === null ? "" : this.byTime ? seconds(n) : short(n))), space: 70 },
        { ...axis, values: (_, splits) => splits.map(short), size: 60 },
      ],
      series: [
        { label: this.byTime ? "time" : "iteration", value: (_, n) => (n === null ? "–" : this.byTime ? seconds(n) : String(n)) },
        ...this.chosen.map((each, place) => ({
          label: this.chosen.length > 1 ? `${each.id} ${each.job.name}` : name,
          stroke: colour(place), width: 1.6, spanGaps: true,
          value: (_, n) => (n === null ? "–" : short(n)),
          points: { show: data[0].length < 3 },
        })),
      ],
    };
    return { plot: new uPlot(options, data, box), box };
  }

  width() {
    const style = getComputedStyle(this.box);
    const columns = style.gridTemplateColumns.split(" ").map(parseFloat).filter(Boolean);
    return Math.max(240, Math.floor(columns[0] ?? this.box.clientWidth) - 2);
  }

  resize() {
    for (const { plot } of this.plots.values()) plot.setSize({ width: this.width(), height: HEIGHT });
  }

  showNames(names) {
    const known = [...this.metric.options].map((option) => option.value);
    if (known.join() === names.join()) return;
    const kept = this.metric.value;
    this.metric.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    this.metric.value = names.includes(kept) ? kept : names.includes("accuracy") ? "accuracy" : names[0] ?? "";
  }

  showReach() {
    const value = this.value.valueAsNumber;
    if (Number.isNaN(value)) return this.reach.replaceChildren();
    const rows = this.chosen.map((each) => {
      const found = reached(each, this.metric.value, value);
      return [`${each.id} ${each.job.name}`, found ? String(found.iteration) : "not yet", found ? seconds(found.seconds) : "–"];
    });
    return this.reach.replaceChildren(table(["job", "#iteration", "#time"], rows));
  }
}

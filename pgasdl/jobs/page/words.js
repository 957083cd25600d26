// Numbers, times and elements as people read them.

/** Make an element; texts among the children stay texts. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat());
  return element;
}

/** A section with a heading. */
export const section = (name, ...children) =>
  make("section", { class: name.toLowerCase().replaceAll(" ", "-") }, make("h3", {}, name), ...children);

/** A table; columns of numbers begin with "#". */
export function table(columns, rows) {
  const numeric = columns.map((name) => name.startsWith("#"));
  const cells = (tag, row) =>
    row.map((cell, at) => make(tag, numeric[at] ? { class: "number" } : {}, cell));
  const names = columns.map((name) => name.replace("#", ""));
  return make("div", { class: "scrolls" }, make("table", {},
    make("thead", {}, make("tr", {}, cells("th", names))),
    make("tbody", {}, rows.map((row) => make("tr", {}, cells("td", row))))));
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(n) {
  let unit = 0;
  while (n >= 1024 && unit < UNITS.length - 1) { n /= 1024; unit += 1; }
  return `${unit === 0 ? n.toFixed(0) : short(n)} ${UNITS[unit]}`;
}

/** Three digits that count. */
export function short(n) {
  if (n === null || n === undefined || Number.isNaN(n)) return "–";
  const size = Math.abs(n);
  if (size !== 0 && (size >= 1e6 || size < 1e-4)) return n.toExponential(2);
  return Number(n.toPrecision(size >= 100 ? Math.ceil(Math.log10(size + 1)) : 3)).toString();
}

export function seconds(n) {
  if (n === null || n === undefined) return "–";
  if (n < 1e-3) return `${short(n * 1e6)} µs`;
  if (n < 1) return `${short(n * 1e3)} ms`;
  if (n < 60) return `${short(n)} s`;
  const [h, m, s] = [Math.floor(n / 3600), Math.floor(n / 60) % 60, Math.floor(n % 60)];
  return h ? `${h} h ${m} min` : `${m} min ${s} s`;
}

export const percent = (n) => `${short(100 * n)} %`;

export function moment(time) {
  const then = new Date(1000 * time);
  const today = then.toDateString() === new Date().toDateString();
  return today ? then.toLocaleTimeString() : then.toLocaleString();
}

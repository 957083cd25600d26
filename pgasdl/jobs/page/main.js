// The page: it hears what happens, brings what is shown up to date, and draws it.
import * as api from "./api.js";
import { Charts } from "./charts.js";
import { jobHead, jobList } from "./jobs.js";
import { ranksOf } from "./ranks.js";
import { Story } from "./story.js";
import { Watched } from "./watched.js";
import { make } from "./words.js";

const EVERY = 1000; // milliseconds from one look to the next, at least
const SILENCE = 30_000; // milliseconds; the server speaks earlier
const PAUSE = 2000; // milliseconds before it looks for a server that went away
const [main, login, connection] = ["main", "#login", "#connection"].map((name) => document.querySelector(name));
const [list, article] = [main.querySelector("nav"), main.querySelector("article")];

const charts = new Charts();
const story = new Story();
const heads = make("div", { class: "heads" });
const ranks = make("div");
article.append(heads, charts.element, ranks, story.element);

let jobs = [];
let pages = 1;
let more = false;
let chosen = []; // Watched, in the order in which they were chosen
const stale = { jobs: true, whole: new Set(), reports: new Set(), logs: new Map() };

function say(text, isTrouble = false) {
  connection.textContent = text;
  connection.classList.toggle("trouble", isTrouble);
}

// --- what is shown

const idsOfAddress = () => (new URLSearchParams(location.hash.slice(1)).get("jobs") ?? "")
  .split(",").map(Number).filter((id) => Number.isInteger(id) && id > 0).slice(0, 8);

function choose(ids) {
  location.hash = ids.length ? `jobs=${ids.join()}` : "";
}

function follow() {
  const known = new Map(chosen.map((each) => [each.id, each]));
  chosen = idsOfAddress().map((id) => {
    if (!known.has(id)) stale.whole.add(id);
    return known.get(id) ?? new Watched(id);
  });
  look();
}

async function loadJobs() {
  let before = "";
  jobs = [];
  for (let page = 0; page < pages; page += 1) {
    const answer = await api.get(`/jobs?limit=50${before}`);
    jobs.push(...answer.jobs);
    more = answer.next !== null;
    if (!more) break;
    before = `&before=${answer.next}`;
  }
  if (!chosen.length && !location.hash && jobs.length) choose([jobs[0].id]);
}

async function bringUpToDate() {
  if (stale.jobs) { stale.jobs = false; await loadJobs(); }
  for (const watched of [...chosen]) {
    const { id } = watched;
    if (stale.whole.delete(id)) {
      try {
        await watched.load();
      } catch (error) {
        if (error.status !== 404) throw error;
        chosen = chosen.filter((each) => each !== watched);
        continue;
      }
    }
    if (stale.reports.delete(id)) await watched.loadReports();
    if (stale.logs.has(id)) {
      const size = stale.logs.get(id);
      stale.logs.delete(id);
      await watched.loadLog(size);
    }
  }
}

function draw() {
  list.replaceChildren(jobList(jobs, idsOfAddress(), choose, more && (() => {
    pages += 1;
    stale.jobs = true;
    look();
  })));
  const shown = chosen.filter((each) => each.job);
  heads.replaceChildren(...shown.map((each, place) => jobHead(each, place, shown.length > 1)));
  charts.show(shown);
  const alone = shown.length === 1 ? shown[0] : null;
  ranks.replaceChildren(...(alone ? ranksOf(alone) : []));
  story.element.hidden = !alone;
  if (alone) story.show(alone);
}

let looking = false;
let again = false;

/** Bring up to date and draw, one time after another, at most once in a while. */
async function look() {
  again = true;
  if (looking) return;
  looking = true;
  try {
    while (again && !document.hidden) {
      again = false;
      await bringUpToDate();
      draw();
      await new Promise((over) => setTimeout(over, EVERY));
    }
  } catch (error) {
    fail(error);
  } finally {
    looking = false;
  }
}

// --- what is heard

function hear(kind, document) {
  const watched = chosen.find((each) => each.id === document.job);
  if (kind === "now") {
    stale.jobs = true;
    for (const each of chosen) stale.whole.add(each.id);
  } else if (kind === "state") {
    stale.jobs = true;
    if (watched) stale.whole.add(watched.id);
  } else if (watched && kind === "news") {
    stale.reports.add(watched.id);
    stale.logs.set(watched.id, document.size);
  } else if (watched) {
    watched.history.push({ event: kind, ...document });
  } else {
    return;
  }
  look();
}

let connected = null; // what ends the connection
let proved = false; // the server knew the token

async function connect() {
  if (connected || document.hidden) return;
  const ending = new AbortController();
  connected = ending;
  let patience = setTimeout(() => ending.abort(), SILENCE);
  try {
    await api.listen("/events", (kind, document) => {
      clearTimeout(patience);
      patience = setTimeout(() => ending.abort(), SILENCE);
      if (kind === "now") opened();
      hear(kind, document);
    }, ending.signal);
    say("the server has ended", true);
  } catch (error) {
    if (!document.hidden) fail(error);
  } finally {
    clearTimeout(patience);
    connected = null;
  }
  if (login.hidden) setTimeout(connect, PAUSE);
}

async function opened() {
  proved = true;
  login.hidden = true;
  main.hidden = false;
  const trouble = await api.trouble().catch(() => "");
  say(trouble ? `jobs neither start nor end: ${trouble}` : "live", trouble !== "");
}

function fail(error) {
  if (error.status === 401 && !proved) ask("The server does not know this token.");
  else say(error instanceof api.Refused ? error.message : `a fault of this page: ${error}`, true);
}

function ask(why = "") {
  login.hidden = false;
  main.hidden = true;
  say("");
  login.querySelector("#refusal").textContent = why;
  login.querySelector("input").focus();
}

login.addEventListener("submit", (event) => {
  event.preventDefault();
  api.setToken(login.querySelector("input").value.trim());
  login.querySelector("input").value = "";
  login.hidden = true;
  connect();
});
addEventListener("hashchange", follow);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) connected?.abort();
  else connect();
});

const known = api.takeToken();
chosen = idsOfAddress().map((id) => new Watched(id));
if (known) connect();
else ask();

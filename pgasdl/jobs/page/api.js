// What the server is asked.

const KEY = "pgasdl-token";

export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** The token in the address, which is not left there, or the last one that was taken. */
export function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    setToken(given);
    history.replaceState(null, "", location.pathname);
  }
  return localStorage.getItem(KEY);
}

export const setToken = (token) => localStorage.setItem(KEY, token);
export const forgetToken = () => localStorage.removeItem(KEY);

async function ask(path, signal) {
  const token = localStorage.getItem(KEY);
  if (!/^[!-~]+$/.test(token)) throw new Refused(401, "no token");
  const headers = { Authorization: `Bearer ${token}` };
  const answer = await fetch(path, { headers, signal, cache: "no-store" });
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, problem.detail ?? answer.statusText);
}

export const get = async (path) => (await ask(`api/v1${path}`)).json();

/** The end of a job's log: its last bytes, from a byte on at the earliest. */
export async function logEnd(job, size, most) {
  const offset = Math.max(0, size - most);
  const data = await (await ask(`api/v1/jobs/${job}/log?offset=${offset}`)).arrayBuffer();
  return { offset, text: new TextDecoder().decode(data) };
}

/** Why jobs neither start nor end at present; "" if they do. */
export async function trouble() {
  const answer = await fetch("readyz", { cache: "no-store" });
  return answer.ok ? "" : (await answer.json()).detail;
}

/**
 * Call `tell(kind, document)` for each server-sent event, until `signal` ends it or the connection
 * does. EventSource would send no token.
 */
export async function listen(path, tell, signal) {
  const answer = await ask(`api/v1${path}`, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (kept + value).split("\n\n");
    kept = blocks.pop();
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s, 2)));
      if (fields.event) tell(fields.event, JSON.parse(fields.data));
    }
  }
}

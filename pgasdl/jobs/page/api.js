// What the server is asked. The token is never sent, nor kept: proof.py tells how.
import { digest, signature } from "./proof.js";

let token = "";
let challenge = "-";

export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** The token in the address, which is not left there. */
export function takeToken() {
  token = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
  localStorage.removeItem("pgasdl-token"); // an earlier page kept it
  if (token) history.replaceState(null, "", location.pathname);
  return token;
}

export const setToken = (given) => { token = given; };

const gone = () => { throw new Refused(0, "no server answers"); };

/** An answer of the server; its bytes, but of a stream. */
async function ask(path, signal, again = false) {
  if (challenge === "-" && path !== "/livez") await ask("/livez", signal); // which is for all
  const nonce = Array.from(crypto.getRandomValues(new Uint8Array(16)), (n) => n.toString(16).padStart(2, "0")).join("");
  const parts = [challenge, nonce, digest(new Uint8Array())];
  const signed = signature(token, "request", challenge, nonce, "GET", path, parts[2]);
  const headers = { Authorization: `Pgasdl ${parts.join(" ")} ${signed}` };
  const answer = await fetch(path, { headers, signal, cache: "no-store" }).catch(gone);
  const streams = answer.headers.get("Content-Type")?.startsWith("text/event-stream");
  const data = streams ? null : new Uint8Array(await answer.arrayBuffer().catch(gone));
  const [next, proof] = (answer.headers.get("Pgasdl-Proof") ?? "").split(" ");
  if (proof !== signature(token, "answer", next, nonce, String(answer.status), streams ? "stream" : digest(data))) {
    throw new Refused(401, "who answers does not know the token");
  }
  challenge = next;
  if (answer.ok) return data ?? answer;
  if (answer.status === 401 && !again) return ask(path, signal, true);
  throw new Refused(answer.status, parsed(data).detail);
}

const parsed = (data) => JSON.parse(new TextDecoder().decode(data));

export const get = async (path) => parsed(await ask(`/api/v1${path}`));

/** The end of a job's log: its last bytes, from a byte on at the earliest. */
export async function logEnd(job, size, most) {
  const offset = Math.max(0, size - most);
  const data = await ask(`/api/v1/jobs/${job}/log?offset=${offset}`);
  return { offset, text: new TextDecoder().decode(data) };
}

/** Why jobs neither start nor end at present; "" if they do. */
export async function trouble() {
  return ask("/readyz").then(() => "", (error) => error.message);
}

/**
 * Call `tell(kind, document)` for each server-sent event, until `signal` ends it or the connection
 * does. EventSource would send no token.
 */
export async function listen(path, tell, signal) {
  const answer = await ask(`/api/v1${path}`, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const { value, done } = await reader.read().catch(gone);
    if (done) return;
    const blocks = (kept + value).split("\n\n");
    kept = blocks.pop();
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s, 2)));
      if (fields.event) tell(fields.event, JSON.parse(fields.data));
    }
  }
}

// SHA-256 and HMAC: browsers have them only for pages of this machine or over TLS.

const K = [];
const START = [];
const bits = (x) => ((x - Math.floor(x)) * 2 ** 32) | 0; // of the fraction, the first 32
for (let n = 2; K.length < 64; n += 1) {
  if (Array.from({ length: n - 2 }, (_, at) => at + 2).some((divisor) => n % divisor === 0)) continue;
  if (START.length < 8) START.push(bits(Math.sqrt(n)));
  K.push(bits(Math.cbrt(n)));
}
const turned = (x, n) => (x >>> n) | (x << (32 - n));

function sha256(data) {
  const padded = new DataView(new ArrayBuffer((data.length + 72) & ~63));
  new Uint8Array(padded.buffer).set(data);
  padded.setUint8(data.length, 0x80);
  padded.setUint32(padded.byteLength - 8, Math.floor(data.length / 2 ** 29));
  padded.setUint32(padded.byteLength - 4, data.length << 3);
  const hash = Int32Array.from(START);
  const w = new Int32Array(64);
  for (let block = 0; block < padded.byteLength; block += 64) {
    let [a, b, c, d, e, f, g, h] = hash;
    for (let t = 0; t < 64; t += 1) {
      if (t < 16) {
        w[t] = padded.getInt32(block + 4 * t);
      } else {
        const x = w[t - 15];
        const y = w[t - 2];
        w[t] = w[t - 16] + (turned(x, 7) ^ turned(x, 18) ^ (x >>> 3)) + w[t - 7] + (turned(y, 17) ^ turned(y, 19) ^ (y >>> 10));
      }
      const one = (h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) + K[t] + w[t]) | 0;
      const two = ((turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g; g = f; f = e; e = (d + one) | 0; d = c; c = b; b = a; a = (one + two) | 0;
    }
    [a, b, c, d, e, f, g, h].forEach((x, at) => { hash[at] += x; });
  }
  const found = new DataView(new ArrayBuffer(32));
  hash.forEach((x, at) => found.setInt32(4 * at, x));
  return new Uint8Array(found.buffer);
}

const bytes = (text) => new TextEncoder().encode(text);
const hex = (data) => Array.from(data, (n) => n.toString(16).padStart(2, "0")).join("");
const joined = (key, mask, data) => Uint8Array.from([...key.map((n) => n ^ mask), ...data]);

/** What a signature covers of a body. */
export const digest = (data) => hex(sha256(data));

/** Sign parts of which none has a line break. */
export function signature(secret, ...parts) {
  const given = bytes(secret);
  const key = new Uint8Array(64);
  key.set(given.length > 64 ? sha256(given) : given);
  return hex(sha256(joined(key, 0x5c, sha256(joined(key, 0x36, bytes(parts.join("\n")))))));
}

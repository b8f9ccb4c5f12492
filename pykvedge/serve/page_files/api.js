// What the page asks the server, with the key where one is wanted.

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const KEY = "kvedge-key";
let key = stored();

function stored() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null; // the browser stores nothing
  }
}

export function setKey(given) {
  key = given;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // the key holds until the page is loaded again
  }
}

export const hasKey = () => Boolean(key);

async function request(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?", 0);
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  const body = await response.json().catch(() => ({}));
  const why = body.error?.message ?? `status ${response.status}, and no reason`;
  return said(why, response.status, response.headers.get("Retry-After"));
}

const BUSY = "The server is busy";
const WORDS = { 401: "The server does not know this key", 413: "This is too large", 429: BUSY, 503: BUSY };

function said(text, status, wait) {
  const what = WORDS[status] ?? (status < 500 ? "The server refuses this" : "The server failed");
  return new ApiError(`${what}: ${text}.${wait ? ` Try again in ${wait} s.` : ""}`, status);
}

export async function read(path) {
  return (await request(path)).json();
}

export async function remove(path) {
  return (await request(path, { method: "DELETE" })).json();
}

// The JSON of each event of a stream, until it ends.
async function* events(response) {
  const decoder = new TextDecoderStream();
  const reader = response.body.pipeThrough(decoder).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "data: [DONE]") return;
        if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export async function* watch(path, signal) {
  yield* events(await request(path, { signal }));
}

// The chunks of an answer. A chunk that tells of an error is thrown.
export async function* chat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  let ended = false;
  for await (const chunk of events(response)) {
    if (chunk.error) throw said(chunk.error.message, chunk.error.type === "server_error" ? 500 : 400);
    ended ||= Boolean(chunk.usage);
    yield chunk;
  }
  if (!ended) throw new ApiError("The answer broke off: the server has gone.", 0);
}

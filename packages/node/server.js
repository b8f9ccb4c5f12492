// `kvedge serve` as a child of this process: found, started, watched and ended.

import { spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync } from "node:fs";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

import { Client } from "./client.js";
import { ServerGoneError, StartError } from "./errors.js";

const PROGRAM = process.platform === "win32" ? "kvedge.exe" : "kvedge";
const BUNDLE = fileURLToPath(new URL(`./kvedge/bin/${PROGRAM}`, import.meta.url));
const PATIENCE_MS = 15_000; // the server gives running answers 10 seconds

/** @implements {import("./index.d.ts").Server} */
export class Server extends Client {
  #child;
  #ended;

  constructor(child, told, ended, key) {
    super(told.url, { key });
    this.#child = child;
    ({ model: this.model, pid: this.pid, version: this.version } = told);
    this.#ended = ended;
  }

  get ended() {
    this.#child.ref(); // who waits for it keeps the program running
    return this.#ended;
  }

  async close() {
    this.#child.stdin.end(); // the server ends with its stdin, on every system
    const late = setTimeout(() => this.#child.kill("SIGKILL"), PATIENCE_MS);
    await this.ended;
    clearTimeout(late);
  }

  async gone(cause) {
    let timer; // keeps the program running until the end of the child is known
    const still = new Promise((resolve) => (timer = setTimeout(resolve, 1000)));
    const end = await Promise.race([this.#ended, still]);
    clearTimeout(timer);
    return end ? new ServerGoneError(`the kvedge server has ended: ${end.why}`, { cause }) : super.gone(cause);
  }
}

export async function start({ program, model, mmproj, args = [], env, key, log, signal } = {}) {
  signal?.throwIfAborted();
  const { path, told } = found(program);
  const files = [...(model ? ["--model", model] : []), ...(mmproj ? ["--mmproj", mmproj] : [])];
  const options = ["serve", "--port", "0", "--parent-pid", String(process.pid), ...files, ...args];
  const child = spawn(path, options.map(String), { env: { ...process.env, ...env }, windowsHide: true });
  let last = "";
  createInterface({ input: child.stderr }).on("line", (line) => {
    if (line.trim()) last = line.replace(/^kvedge: (error: )?/, "");
    log?.(line);
  });
  child.stdin.on("error", () => {}); // it has ended already
  const failed = new Promise((_, reject) => child.on("error", (error) => reject(unstartable(path, told, error))));
  const ended = new Promise((resolve) => {
    child.once("close", (code, by) => {
      const how = by ? `it was ended by ${by}` : `exit code ${code}`;
      resolve({ code, signal: by, why: last && code ? `${how}: ${last}` : how });
    });
  });
  const stop = () => child.kill("SIGKILL");
  signal?.addEventListener("abort", stop, { once: true });
  try {
    const first = firstLine(child, path);
    const early = ended.then(({ code, why }) => {
      throw new StartError(`kvedge serve did not start: ${why}`, { exitCode: code });
    });
    const begun = await Promise.race([first, failed, early]);
    for (const part of [child, child.stdin, child.stdout, child.stderr]) part.unref();
    return new Server(child, begun, ended, key);
  } catch (error) {
    stop();
    throw signal?.aborted ? signal.reason : error;
  } finally {
    signal?.removeEventListener("abort", stop);
  }
}

function found(program) {
  if (program) return { path: program, told: "the option `program`" };
  if (process.env.KVEDGE_PROGRAM) return { path: process.env.KVEDGE_PROGRAM, told: "KVEDGE_PROGRAM" };
  if (existsSync(BUNDLE)) return { path: BUNDLE, told: "the bundle" };
  return { path: PROGRAM, told: "PATH" };
}

function unstartable(path, told, error) {
  const missing = error.code === "ENOENT" && !existsSync(path);
  const why = missing ? "there is no such program" : error.code === "ENOENT" ? "its loader or interpreter is missing"
    : error.code === "EACCES" ? "it may not be executed here" : error.message; // prettier-ignore
  const hint = "install kvedge (pip install kvedge), or set `program` or KVEDGE_PROGRAM to it";
  return new StartError(`cannot start ${path} (from ${told}): ${why}; ${hint}`, { cause: error });
}

// Reads the line that tells the address, and lets all later output go by.
async function firstLine(child, path) {
  const [line] = await once(createInterface({ input: child.stdout }), "line");
  try {
    const told = JSON.parse(line);
    if (typeof told.url === "string") return told;
  } catch {
    // said below
  }
  throw new StartError(`${path} is no kvedge: it began with ${JSON.stringify(line.slice(0, 80))}, not with its address`);
}

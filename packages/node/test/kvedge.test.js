// Against a real server: KVEDGE_PROGRAM is the kvedge under test.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { readFile } from "node:fs/promises";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import * as kvedge from "kvedge";

const at = (name) => fileURLToPath(new URL(`../../../examples/${name}`, import.meta.url));
const SCENE = at("scene-1.png");
const QUESTION = "What is the code?";
const ENDLESS = 'root ::= "a" root';
const ARGS = ["--threads", 1, "--quiet"];
const alive = (pid) => {
  try {
    return process.kill(pid, 0);
  } catch {
    return false;
  }
};

let server;
before(async () => {
  server = await kvedge.start({ args: ARGS });
});
after(() => server.close());

test("an answer, from each form of a picture, and what was kept", async () => {
  const bytes = await readFile(SCENE);
  const url = `data:image/png;base64,${bytes.toString("base64")}`;
  for (const image of [SCENE, new URL(`file://${SCENE}`), bytes, new Uint8Array(bytes).buffer, url]) {
    const { text, kept, usage } = await server.chat(QUESTION, { images: [image] });
    assert.equal(text, "64UM3");
    assert.ok(kept.kv.kept_bytes > 0 && kept.kv.kept_bytes < kept.kv.full_bytes);
    assert.equal(usage.prompt_tokens, await server.tokens(QUESTION, { images: [image] }));
  }
});

test("the pieces of a stream are the whole answer, which is the server's", async () => {
  const messages = [{ role: "user", content: "Describe the image.", images: [at("scene-2.png")] }];
  const pieces = [];
  let answer;
  for await (const event of server.stream(messages, { max_tokens: 60, progress: true })) {
    if (event.type === "text") pieces.push(event.text);
    if (event.type === "end") answer = event.answer;
  }
  const content = [
    { type: "image_url", image_url: `data:image/png;base64,${(await readFile(at("scene-2.png"))).toString("base64")}` },
    { type: "text", text: "Describe the image." },
  ];
  const response = await fetch(`${server.url}/v1/chat/completions`, {
    method: "POST",
    body: JSON.stringify({ messages: [{ role: "user", content }], max_tokens: 60 }),
  });
  const [{ message, finish_reason }] = (await response.json()).choices;
  assert.ok(pieces.length > 1);
  assert.deepEqual([pieces.join(""), answer.text, answer.finish], [message.content, message.content, finish_reason]);
  const again = [...messages, answer.message, { role: "user", content: "What is the code?" }];
  assert.ok((await server.chat(again)).usage.prompt_tokens_details.cached_tokens > 0);
});

test("plans by name and by fields", async () => {
  const ask = async (plan) => (await server.chat(QUESTION, { images: [SCENE], plan })).kept;
  for (const plan of ["snapkv-0.1", { method: "snapkv", budget: 0.1, settings: { recent: 8 } }]) {
    const { method, budget, kv } = await ask(plan);
    assert.deepEqual([method, budget, kv.kept_bytes * 10], ["snapkv", 0.1, kv.full_bytes]);
  }
  assert.equal((await server.plan({ method: "snapkv", budget: 0.1 })).scorer, "window");
  assert.ok((await server.methods()).methods.includes("snapkv"));
  await assert.rejects(ask("nosuch-0.1"), { name: "RequestError", status: 400, message: /unknown method 'nosuch'/ });
});

test("answers by a schema, and calls of tools", async () => {
  const schema = { type: "object", properties: { n: { type: "integer", enum: [3, 4] } }, required: ["n"] };
  const { data } = await server.chat("How many?", { images: [SCENE], schema });
  assert.ok([3, 4].includes(data.n));
  await assert.rejects(server.chat("How many?", { schema, max_tokens: 2 }), (error) =>
    error instanceof kvedge.IncompleteError && error.answer.finish === "length");
  const tools = [{ type: "function", function: { name: "look", parameters: schema } }];
  const called = [];
  for await (const event of server.stream("Look.", { tools, tool_choice: "required" })) {
    if (event.type === "toolCall") called.push(event.arguments);
    if (event.type !== "end") continue;
    const [call] = event.answer.toolCalls;
    assert.deepEqual([call.name, call.arguments], ["look", called.join("")]);
    assert.ok([3, 4].includes(JSON.parse(call.arguments).n));
  }
});

test("memory, its events, conversations listed and deleted", async () => {
  await server.chat("Hello");
  const before = await server.conversations();
  assert.ok(before.length > 0 && (await server.memory()).parked_bytes > 0);
  const watching = new AbortController();
  const seen = [];
  await assert.rejects(async () => {
    for await (const { memory } of server.memoryEvents({ signal: watching.signal })) {
      seen.push(memory.parked_conversations);
      if (seen.length === 1) await server.deleteConversation(before[0].id);
      else watching.abort();
    }
  }, { name: "AbortError" });
  assert.equal(seen[1], seen[0] - 1);
  await assert.rejects(server.deleteConversation(before[0].id), kvedge.NotFoundError);
});

test("an aborted answer stops in the server, and so does one whose loop is left", async () => {
  const idle = async () => {
    while ((await server.memory()).running) await new Promise((go) => setTimeout(go, 50));
  };
  const stop = new AbortController();
  const ask = server.stream("Hello", { grammar: ENDLESS, signal: stop.signal });
  await assert.rejects(async () => {
    for await (const event of ask) if (event.type === "text") stop.abort();
  }, { name: "AbortError" });
  await idle();
  for await (const event of server.stream("Hello", { grammar: ENDLESS })) if (event.type === "text") break;
  await idle();
  await assert.rejects(server.chat("Hello", { signal: AbortSignal.abort() }), { name: "AbortError" });
});

test("refusals are named errors", async () => {
  await assert.rejects(server.chat("word ".repeat(5000)), kvedge.TooLongError);
  await assert.rejects(server.chat("?", { images: ["/none.png"] }), kvedge.PictureError);
  await assert.rejects(server.chat("?", { images: [Buffer.from("no picture")] }), kvedge.RequestError);
  await assert.rejects(server.chat("?", { temperature: -1 }), { name: "RequestError", param: "temperature" });
  await assert.rejects(server.chat("?", { n: 2 }), /one answer a call/);
  const nobody = new kvedge.Client("http://127.0.0.1:9");
  await assert.rejects(nobody.memory(), kvedge.ServerGoneError);
});

test("two servers; one is killed in the middle of an answer", async () => {
  const lines = [];
  const other = await kvedge.start({ args: ["--threads", 1], log: (line) => lines.push(line) });
  assert.notEqual(other.url, server.url);
  const asked = async () => {
    for await (const event of other.stream("Hello", { grammar: ENDLESS }))
      if (event.type === "text") process.kill(other.pid, "SIGKILL");
  };
  await assert.rejects(asked, { name: "ServerGoneError", message: /ended by SIGKILL/ });
  await assert.rejects(other.memory(), kvedge.ServerGoneError);
  assert.equal((await other.ended).signal, "SIGKILL");
  assert.match(lines.join("\n"), /answers at/);
  await other.close(); // does nothing
  assert.equal((await server.chat(QUESTION, { images: [SCENE] })).text, "64UM3");
});

test("what cannot start says why in one line", async () => {
  const failing = async (options, pattern) => {
    await assert.rejects(kvedge.start(options), (error) => {
      assert.ok(error instanceof kvedge.StartError);
      assert.match(error.message, pattern);
      assert.ok(!error.message.includes("\n"));
      return true;
    });
  };
  await Promise.all([
    failing({ program: "/none/kvedge" }, /\/none\/kvedge \(from the option `program`\): there is no such program/),
    failing({ program: fileURLToPath(import.meta.url) }, /may not be executed/),
    failing({ program: "/bin/echo" }, /echo is no kvedge: it began with "serve --port/),
    failing({ args: ["--bogus"] }, /exit code 2: No such option '--bogus'/),
    failing({ model: "/none.gguf" }, /exit code 1: \/none\.gguf does not exist/),
  ]);
  await assert.rejects(kvedge.start({ signal: AbortSignal.timeout(1) }), { name: "TimeoutError" });
});

test("a server ends with its program, which need not close it", async () => {
  const script = `import { start } from "kvedge";
    const server = await start({ args: ["--quiet"] });
    console.log(server.pid);
    if (process.argv[1]) process.kill(process.pid, process.argv[1]);`;
  await Promise.all([[], ["SIGKILL"]].map(async (signal) => {
    const program = spawn(process.execPath, ["--input-type=module", "-e", script, ...signal], { cwd: import.meta.dirname });
    let told = "";
    program.stdout.on("data", (data) => (told += data));
    await once(program, "close");
    assert.ok(Number(told) > 0);
    const end = Date.now() + 20_000;
    while (alive(Number(told)) && Date.now() < end) await new Promise((go) => setTimeout(go, 50));
    assert.ok(!alive(Number(told)));
  }));
});

// Compiled, not run: what a program may and may not write.
import { BusyError, start, type Answer, type Client, type Server } from "kvedge";

export async function use(client: Client): Promise<string> {
  const server: Server = await start({ args: ["--budget", 0.2], signal: AbortSignal.timeout(1000) });
  const answer: Answer = await server.chat("?", { images: ["a.png", new Uint8Array(3)], plan: "snapkv-0.2" });
  for await (const event of client.stream([{ role: "user", content: "?", images: [new URL("file:///a.png")] }])) {
    if (event.type === "text") console.log(event.text.length);
    if (event.type === "end") console.log(event.answer.kept.kv.kept_bytes, event.answer.data);
    // @ts-expect-error: progress has no text
    if (event.type === "progress") console.log(event.text);
  }
  for await (const { memory } of client.memoryEvents()) console.log(memory.kv_bytes);
  // @ts-expect-error: a budget is a number
  await client.plan({ budget: "0.2" });
  // @ts-expect-error: no such role
  await client.chat([{ role: "person", content: "?" }]);
  try {
    await server.close();
  } catch (error) {
    if (error instanceof BusyError) console.log(error.retryAfter, error.status);
  }
  return answer.text;
}

// What the main process does, without Electron: owns the server, answers one question at a time.
import { start } from "kvedge";

export class Asking {
  #server;
  #stop;

  constructor(options) {
    this.#server = start(options);
    this.#server.catch(() => {}); // told by ask
  }

  /** Answers about a picture; tell gets each piece of text, then the share of the KV cache that was kept. */
  async ask(question, picture, tell) {
    this.stop();
    const { signal } = (this.#stop = new AbortController());
    try {
      const images = picture ? [new Uint8Array(picture)] : [];
      for await (const event of (await this.#server).stream(String(question), { images, signal })) {
        if (event.type === "text") tell({ text: event.text });
        if (event.type !== "end") continue;
        const { kept_bytes: kept, full_bytes: full } = event.answer.kept.kv;
        tell({ share: full ? kept / full : 1 });
      }
    } catch (error) {
      if (!signal.aborted) tell({ error: error.message });
    }
  }

  stop() {
    this.#stop?.abort();
  }

  async close() {
    this.stop();
    await (await this.#server.catch(() => null))?.close();
  }
}

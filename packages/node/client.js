// The client of a kvedge server. index.d.ts says what each function takes and returns.

import { readFile } from "node:fs/promises";

import { IncompleteError, KvedgeError, PictureError, ServerGoneError, refused } from "./errors.js";

/** @implements {import("./index.d.ts").Client} */
export class Client {
  #headers;
  #name;

  constructor(url, { key } = {}) {
    this.url = String(url).replace(/\/+$/, "");
    this.#headers = key ? { Authorization: `Bearer ${key}` } : {};
  }

  async chat(question, options) {
    for await (const event of this.stream(question, options)) if (event.type === "end") return event.answer;
    throw await this.gone(); // unreachable: a stream without an end throws
  }

  async *stream(question, { signal, ...options } = {}) {
    const body = await this.#body(question, options);
    const response = await this.#request("/v1/chat/completions", { body: { ...body, ...STREAMED }, signal });
    const answer = { text: "", reasoning: "", toolCalls: [], finish: null };
    for await (const chunk of this.#events(response, signal)) {
      if (chunk.kvedge?.progress) yield { type: "progress", ...chunk.kvedge.progress };
      const [choice] = chunk.choices;
      if (choice) yield* gathered(answer, choice);
      if (chunk.usage) return yield { type: "end", answer: finished(answer, chunk, options.schema) };
    }
    throw await this.gone(); // it ended as a whole response, but without the figures
  }

  async tokens(question, { signal, ...options } = {}) {
    const body = await this.#body(question, options);
    return (await this.#json("/v1/chat/completions/input_tokens", { body, signal })).input_tokens;
  }

  async tokenize(text, { signal } = {}) {
    return (await this.#json("/tokenize", { body: { content: text }, signal })).tokens;
  }

  async info({ signal } = {}) {
    const [model] = (await this.#json("/v1/models", { signal })).data;
    return { model: model.id, nCtx: model.kvedge.n_ctx, images: model.kvedge.images, method: model.kvedge.method,
      budget: model.kvedge.budget, kvBytesPerToken: model.kvedge.kv_bytes_per_token }; // prettier-ignore
  }

  methods({ signal } = {}) {
    return this.#json("/v1/kvedge/methods", { signal });
  }

  plan(choice = {}, { signal } = {}) {
    return this.#json("/v1/kvedge/plan", { body: choice, signal });
  }

  memory({ signal } = {}) {
    return this.#json("/v1/kvedge/memory", { signal });
  }

  async *memoryEvents({ signal } = {}) {
    yield* this.#events(await this.#request("/v1/kvedge/events", { signal }), signal);
  }

  async conversations({ signal } = {}) {
    return (await this.#json("/v1/kvedge/sessions", { signal })).sessions;
  }

  async deleteConversation(id, { signal } = {}) {
    await this.#json(`/v1/kvedge/sessions/${encodeURIComponent(id)}`, { method: "DELETE", signal });
  }

  /** Makes the error for a lost connection. A server of this process knows more. */
  async gone(cause) {
    return new ServerGoneError(`no connection to ${this.url}: ${reason(cause)}; is the server still running?`, { cause });
  }

  async #body(question, { images, plan, schema, patches, edited, progress, ...fields }) {
    if (fields.n !== undefined && fields.n !== 1) throw new KvedgeError("n: one answer a call; call again for more");
    const asked = typeof question === "string" ? [{ role: "user", content: question }] : question;
    const messages = await Promise.all(asked.map(withPictures));
    if (images?.length) {
      const last = messages.findLastIndex((message) => message.role === "user");
      if (last < 0) throw new KvedgeError("images: there is no message of the user that they belong to");
      messages[last] = await withPictures({ ...messages[last], images });
    }
    const kept = typeof plan === "object" ? plan : {};
    const kvedge = Object.entries({ ...kept, patches, edited, progress }).filter(([, value]) => value !== undefined);
    const body = { ...fields, messages };
    if (kvedge.length) body.kvedge = Object.fromEntries(kvedge);
    if (typeof plan === "string") {
      this.#name ??= (await this.info()).model; // a plan follows the model's name
      body.model = `${this.#name}@${plan}`;
    }
    if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    return body;
  }

  async #json(path, options) {
    const response = await this.#request(path, options);
    try {
      return await response.json();
    } catch (error) {
      throw await this.#lost(error, options.signal);
    }
  }

  async #request(path, { method, body, signal }) {
    let response;
    try {
      response = await fetch(this.url + path, {
        method: method ?? (body ? "POST" : "GET"),
        headers: body ? { ...this.#headers, "Content-Type": "application/json" } : this.#headers,
        body: body && JSON.stringify(body),
        signal,
      });
    } catch (error) {
      throw await this.#lost(error, signal);
    }
    if (response.ok) return response;
    const told = await response.json().catch(() => null);
    throw refused(told?.error, response.status, response.headers.get("Retry-After"));
  }

  // The JSON of each event of a stream, until [DONE]. An event that tells of an error is thrown.
  async *#events(response, signal) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
      for (;;) {
        const { value, done } = await reader.read().catch(async (error) => {
          throw await this.#lost(error, signal);
        });
        if (done) return;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) {
          if (line === "data: [DONE]") return;
          if (!line.startsWith("data: ")) continue;
          const event = JSON.parse(line.slice(6));
          if (event.error) throw refused(event.error);
          yield event;
        }
      }
    } finally {
      reader.cancel().catch(() => {}); // who leaves the loop ends the answer
    }
  }

  async #lost(error, signal) {
    return signal?.aborted ? signal.reason : this.gone(error);
  }
}

const STREAMED = { stream: true, stream_options: { include_usage: true } };

const reason = (error) => error?.cause?.code ?? error?.cause?.message ?? error?.message ?? "the stream broke off";

function* gathered(answer, { delta, finish_reason: finish }) {
  if (delta.reasoning_content) {
    answer.reasoning += delta.reasoning_content;
    yield { type: "reasoning", text: delta.reasoning_content };
  }
  if (delta.content) {
    answer.text += delta.content;
    yield { type: "text", text: delta.content };
  }
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    const call = (answer.toolCalls[index] ??= { id, name: called.name, arguments: "" });
    call.arguments += called.arguments ?? "";
    yield { type: "toolCall", index, id: call.id, name: call.name, arguments: called.arguments ?? "" };
  }
  answer.finish = finish ?? answer.finish;
}

function finished(answer, { usage, kvedge: [figures], model }, schema) {
  const message = { role: "assistant", content: answer.text };
  if (answer.reasoning) message.reasoning_content = answer.reasoning;
  if (answer.toolCalls.length)
    message.tool_calls = answer.toolCalls.map(({ id, name, arguments: given }) => (
      { id, type: "function", function: { name, arguments: given } })); // prettier-ignore
  const whole = { ...answer, model, message, usage, kept: figures };
  if (!schema) return whole;
  if (answer.finish !== "stop")
    throw new IncompleteError(`the answer ended early (${answer.finish}); raise max_tokens`, { answer: whole });
  return { ...whole, data: JSON.parse(answer.text) };
}

async function withPictures({ images, ...message }) {
  if (!images?.length) return message;
  const pictures = await Promise.all(images.map(async (image) => (
    { type: "image_url", image_url: { url: await pictureUrl(image) } }))); // prettier-ignore
  const { content } = message;
  const texts = typeof content === "string" ? [{ type: "text", text: content }] : content ?? [];
  return { ...message, content: [...pictures, ...texts] };
}

async function pictureUrl(image) {
  if (image instanceof ArrayBuffer || ArrayBuffer.isView(image)) return dataUrl(image);
  const isUrl = image instanceof URL ? image.protocol !== "file:" : /^(data|https?):/i.test(image);
  if (isUrl) return String(image);
  try {
    return dataUrl(await readFile(image));
  } catch (error) {
    throw new PictureError(`the picture ${image} cannot be read: ${error.code ?? error.message}`, { cause: error });
  }
}

function dataUrl(bytes) {
  const view = ArrayBuffer.isView(bytes) ? bytes : new Uint8Array(bytes);
  const base64 = Buffer.from(view.buffer, view.byteOffset, view.byteLength).toString("base64");
  return `data:image/any;base64,${base64}`; // the server looks at the bytes
}

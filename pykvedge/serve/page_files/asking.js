// A conversation as a request, and its answer as it comes.

import * as api from "./api.js";
import * as choice from "./choice.js";

function wire(said) {
  if (said.role === "assistant") return { role: said.role, content: said.text };
  const files = (said.files ?? []).map(({ name, url }) => ({ type: "file", file: { filename: name, file_data: url } }));
  const pictures = (said.pictures ?? []).map(({ url }) => ({ type: "image_url", image_url: { url } }));
  if (!files.length && !pictures.length) return { role: said.role, content: said.text };
  return { role: said.role, content: [...files, ...pictures, { type: "text", text: said.text }] };
}

// Fills an answer in. tell: called at each step, with { what, share } while the prompt is read, else with nothing.
export async function ask(conversation, said, signal, tell) {
  const { system } = conversation.choice;
  const messages = conversation.messages.map(wire);
  if (system) messages.unshift({ role: "system", content: system });
  const began = performance.now();
  for await (const chunk of api.chat({ messages, ...choice.fields(conversation.choice) }, signal)) {
    if (chunk.kvedge?.progress) tell(chunk.kvedge.progress);
    const delta = chunk.choices[0]?.delta;
    if (delta?.content || delta?.reasoning_content) {
      said.firstS ??= (performance.now() - began) / 1000;
      said.text += delta.content ?? "";
      if (delta.reasoning_content) said.thought = (said.thought ?? "") + delta.reasoning_content;
      tell(null);
    }
    if (chunk.usage) settle(conversation.messages, said, chunk.kvedge[0]);
  }
}

// Gives pictures what the server tells of them: those that were read now are the last ones, and earlier ones lie in rows
// that the server had. Nobody here knows how many pictures a document is, so what lies before one is not looked for.
function settle(messages, said, { patches, ...figures }) {
  said.figures = figures;
  const images = [...(patches?.images ?? [])];
  for (const { pictures = [], files = [] } of messages.toReversed()) {
    for (const picture of pictures.toReversed()) {
      const image = images.pop();
      if (image) picture.kept = { ...image, layers: patches.layers };
    }
    if (files.length || !images.length) return;
  }
}

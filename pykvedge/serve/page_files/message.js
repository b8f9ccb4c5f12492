// How a message looks.

import { markdown } from "./markdown.js";
import { figure } from "./patches.js";
import { bytes, copyButton, element, icon, iconButton, percent, perSecond } from "./show.js";

// actions: [icon, label, what it does] of its buttons.
export function message(said, actions = []) {
  const made = element("article", { className: `message ${said.role}` });
  made.setAttribute("aria-label", said.role === "user" ? "You" : "Answer");
  if (said.files?.length) {
    const files = said.files.map(({ name }) => element("li", { className: "chip" }, icon("file"), name));
    made.append(element("ul", { className: "pictures" }, ...files));
  }
  if (said.pictures?.length) {
    const pictures = said.pictures.map((one, i) => element("li", {}, figure(one, `Picture ${i + 1}`)));
    made.append(element("ul", { className: "pictures" }, ...pictures));
  }
  if (said.role === "assistant") {
    const thoughts = element("details", { className: "thoughts", hidden: true }, element("summary", { textContent: "Reasoning" }));
    thoughts.append(element("div", { className: "thought quiet" }));
    made.append(thoughts);
  }
  const text = element("div", { className: said.role === "user" ? "text" : "text md" });
  const foot = element("div", { className: "foot" });
  if (said.figures || said.stopped) foot.append(element("span", { className: "quiet", textContent: line(said) }));
  if (said.role === "assistant" && said.text) foot.append(copyButton("Copy the answer", () => said.text));
  foot.append(...actions.map(([picture, label, act]) => iconButton(picture, label, act)));
  made.append(element("div", { className: "said" }, text, foot));
  write(made, said);
  return made;
}

// Puts the words of a message where they are seen.
export function write(made, said) {
  const text = made.querySelector(".text");
  if (said.role === "user") text.textContent = said.text;
  else text.replaceChildren(markdown(said.text));
  if (!said.thought) return;
  const thought = made.querySelector(".thought");
  thought.textContent = said.thought;
  thought.parentElement.hidden = false;
  thought.parentElement.open = made.classList.contains("open") && !said.text;
}

// What an answer cost, in a line.
function line({ figures, firstS, stopped }) {
  const parts = stopped ? ["stopped"] : [];
  if (figures) {
    const { kv, tokens } = figures;
    if (kv.full_bytes) parts.push(`${percent(kv.kept_bytes / kv.full_bytes)} of ${bytes(kv.full_bytes)} kept`);
    if (figures.time.decode_tok_s) parts.push(`${perSecond(figures)} tokens/s`);
    if (firstS) parts.push(`first word after ${firstS.toFixed(2)} s`);
    if (tokens.reused) parts.push(`${tokens.reused} tokens not read again`);
    if (figures.stop === "length") parts.push("cut off at the most tokens of an answer");
    if (figures.stop === "context") parts.push("cut off: the conversation is full");
    parts.push(...(figures.notes ?? []));
  }
  return parts.join(" · ");
}

// Answers are Markdown. HTML in an answer is shown as text, and pictures of an answer as their words.

import { marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import { copyButton, element } from "./show.js";

const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const renderer = { html: ({ text }) => escaped(text), image: ({ text, href }) => escaped(text || href) };
marked.use({ gfm: true, breaks: true, renderer });
const FORBID_TAGS = ["img", "style", "form", "input", "button"];
const RULES = { RETURN_DOM_FRAGMENT: true, USE_PROFILES: { html: true }, FORBID_TAGS };

export function markdown(text) {
  const made = DOMPurify.sanitize(marked.parse(text), RULES);
  for (const link of made.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const pre of made.querySelectorAll("pre")) {
    const language = /language-(\S+)/.exec(pre.firstElementChild?.className)?.[1] ?? "";
    const head = element("div", {}, element("span", { textContent: language }), copyButton("Copy the code", () => pre.textContent));
    scrolls(pre, "Code");
    pre.replaceWith(element("div", { className: "code" }, head, pre.cloneNode(true)));
  }
  for (const table of made.querySelectorAll("table")) {
    const box = element("div", { className: "scroll" });
    table.replaceWith(box);
    box.append(table);
    scrolls(box, "Table");
  }
  return made;
}

// Whoever has no pointer scrolls it by keys.
function scrolls(box, name) {
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", name);
}

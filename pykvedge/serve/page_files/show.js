// How figures and messages look.

export const $ = (id) => document.getElementById(id);

export function element(name, fields = {}, ...children) {
  const made = Object.assign(document.createElement(name), fields);
  made.append(...children);
  return made;
}

export function bytes(n) {
  if (n < 1 << 20) return `${(n / 1024).toFixed(1)} KiB`;
  return n < 1 << 30 ? `${(n / (1 << 20)).toFixed(1)} MiB` : `${(n / (1 << 30)).toFixed(2)} GiB`;
}

export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

// A message; actions: [label, what it does] of its buttons.
export function message(said, actions = []) {
  const text = element("div", { className: "text", textContent: said.text });
  const body = element("div", { className: "body" });
  if (said.pictures?.length) {
    const pictures = said.pictures.map((url, i) => element("li", {}, element("img", { src: url, alt: `Picture ${i + 1}` })));
    body.append(element("ul", { className: "pictures" }, ...pictures));
  }
  const thought = element("div", { className: "thought quiet", textContent: said.thought ?? "" });
  const thoughts = element("details", { hidden: !said.thought }, element("summary", { textContent: "Reasoning" }), thought);
  body.append(thoughts, text);
  const foot = element("div", { className: "foot" });
  if (said.figures) foot.append(element("span", { className: "quiet", textContent: line(said.figures) }));
  for (const [label, act] of actions) foot.append(element("button", { className: "plain", textContent: label, onclick: act }));
  const made = element("article", { className: `message ${said.role}` }, body, foot);
  made.setAttribute("aria-label", said.role === "user" ? "You" : "Answer");
  return made;
}

// What an answer cost, in a line.
export function line(figures) {
  const { kv, time, tokens } = figures;
  const parts = [];
  if (kv.full_bytes) parts.push(`${percent(kv.kept_bytes / kv.full_bytes)} of ${bytes(kv.full_bytes)} kept`);
  if (tokens.reused) parts.push(`${tokens.reused} tokens not read again`);
  if (time.decode_steps) parts.push(`${(time.decode_steps / time.decode_s).toFixed(1)} tokens/s`);
  if (figures.stop === "length" || figures.stop === "context") parts.push("cut off: no more tokens");
  return parts.join(" · ");
}

export function bar(id, share) {
  $(id).style.width = `${100 * Math.min(Math.max(share || 0, 0), 1)}%`;
}

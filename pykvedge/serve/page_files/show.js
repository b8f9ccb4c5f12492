// Elements, and how figures are written.

export const $ = (id) => document.getElementById(id);
export const touches = matchMedia("(pointer: coarse)");

export function element(name, fields = {}, ...children) {
  const made = Object.assign(document.createElement(name), fields);
  made.append(...children);
  return made;
}

export function icon(name) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  made.classList.add("icon");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  made.append(use);
  return made;
}

// A button that shows an icon. label: its name for screen readers; title: the name that the pointer shows.
export function iconButton(picture, label, onclick, { className = "plain", title = label } = {}) {
  const made = element("button", { type: "button", className, title, onclick }, icon(picture));
  made.setAttribute("aria-label", label);
  return made;
}

// A button that copies a text, and says so.
export function copyButton(label, text) {
  const made = iconButton("copy", label, async () => {
    const done = await copied(text());
    made.replaceChildren(done ? "Copied" : "The browser does not copy");
    setTimeout(() => made.replaceChildren(icon("copy")), 2000);
  });
  return made;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // pages of plain http have no clipboard
    const area = element("textarea", { value: text, className: "unseen" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

export function bytes(n) {
  const form = (value, unit) => `${value.toFixed(value < 99.5 ? 1 : 0)} ${unit}`;
  if (n < 1 << 20) return form(n / 1024, "KiB");
  return n < 1 << 30 ? form(n / (1 << 20), "MiB") : form(n / (1 << 30), "GiB");
}

export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

export function bar(id, share) {
  $(id).style.width = `${100 * Math.min(Math.max(share || 0, 0), 1)}%`;
}

export function perSecond(figures) {
  const speed = figures?.time.decode_tok_s;
  return speed ? speed.toLocaleString("en", { maximumFractionDigits: speed < 100 ? 1 : 0 }) : "–";
}

// When it was, in words.
export function ago(at) {
  const minutes = Math.round((Date.now() - at) / 60000);
  const words = new Intl.RelativeTimeFormat("en", { numeric: "auto" });
  if (minutes < 1) return "now";
  if (minutes < 60) return words.format(-minutes, "minute");
  if (minutes < 24 * 60) return words.format(-Math.round(minutes / 60), "hour");
  if (minutes < 7 * 24 * 60) return words.format(-Math.round(minutes / 1440), "day");
  return new Date(at).toLocaleDateString("en", { day: "numeric", month: "short", year: "numeric" });
}

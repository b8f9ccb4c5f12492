// A picture of the conversation, and over it what of it is kept: a patch is as bright as the share of heads that keep it.

import { element, icon } from "./show.js";

const DARKEST = 0.84;

// picture: { url, name, kept }. kept: as the server tells of one picture, with the numbers of its layers.
export function figure({ url, name, kept }, place) {
  const image = element("img", { src: url, alt: name ? `${place}: ${name}` : place });
  const frame = element("div", { className: "frame" }, image);
  const made = element("figure", { className: "picture" }, frame);
  if (!kept?.layers.length || !kept.share[0].length) return made;
  const caption = element("figcaption", {}, element("span", { textContent: told(kept, 0) }));
  made.append(caption);
  if (kept.rows > 1) caption.append(...controls(kept, image, frame, caption));
  return made;
}

function controls(kept, image, frame, caption) {
  const veil = element("canvas", { hidden: true });
  veil.setAttribute("aria-hidden", "true");
  frame.append(veil);
  const layer = element("input", { type: "range", min: 0, max: kept.layers.length, value: 0 });
  const name = element("output", { textContent: "all" });
  const slider = element("label", { hidden: true }, "Layer", layer, name);
  layer.oninput = () => {
    name.textContent = layer.value > 0 ? kept.layers[layer.value - 1] : "all";
    caption.firstChild.textContent = told(kept, Number(layer.value));
    layer.setAttribute("aria-valuetext", caption.firstChild.textContent);
    draw(veil, kept, image, Number(layer.value));
  };
  const toggle = element("button", { className: "plain", type: "button" }, icon("patches"), "Show them");
  toggle.setAttribute("aria-pressed", "false");
  toggle.onclick = () => {
    veil.hidden = slider.hidden = !veil.hidden;
    toggle.setAttribute("aria-pressed", String(!veil.hidden));
    if (!veil.hidden) layer.oninput();
  };
  return [toggle, slider];
}

// Shares of the patches, 0 to 1: of one layer, or the mean of all.
function shares(kept, layer) {
  if (layer > 0) return kept.share[layer - 1].map((percent) => percent / 100);
  const sum = kept.share[0].map(() => 0);
  for (const row of kept.share) row.forEach((percent, i) => (sum[i] += percent / 100 / kept.share.length));
  return sum;
}

function told(kept, layer) {
  const share = shares(kept, layer);
  const mean = share.reduce((a, b) => a + b, 0) / share.length;
  const where = layer ? `Layer ${kept.layers[layer - 1]}: ` : "";
  return `${where}${(100 * mean).toFixed(0)} % of ${share.length} ${kept.rows > 1 ? "patches" : "image tokens"} kept`;
}

async function draw(veil, kept, image, layer) {
  await image.decode().catch(() => {});
  const [wide, high] = [image.naturalWidth, image.naturalHeight];
  if (!wide) return;
  const scale = 720 / Math.max(wide, high);
  [veil.width, veil.height] = [Math.max(1, Math.round(wide * scale)), Math.max(1, Math.round(high * scale))];
  // a padded picture lay in the middle of a square, whose patches these are
  const side = Math.max(veil.width, veil.height);
  const [width, height] = kept.padded ? [side, side] : [veil.width, veil.height];
  const [left, top] = [(veil.width - width) / 2, (veil.height - height) / 2];
  const context = veil.getContext("2d");
  const edge = (i, of, length, start) => Math.round(start + (i * length) / of);
  shares(kept, layer).forEach((share, i) => {
    const [row, column] = [Math.floor(i / kept.columns), i % kept.columns];
    const [x, y] = [edge(column, kept.columns, width, left), edge(row, kept.rows, height, top)];
    context.fillStyle = `rgb(8 14 12 / ${DARKEST * (1 - share)})`;
    context.fillRect(x, y, edge(column + 1, kept.columns, width, left) - x, edge(row + 1, kept.rows, height, top) - y);
  });
}

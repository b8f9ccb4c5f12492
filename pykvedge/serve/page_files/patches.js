// What is left of each picture, drawn over it layer by layer: a patch is as bright as the share of heads that keep it.

import { $, element } from "./show.js";

const DARKEST = 0.12;
let shown = null; // { patches, pictures, which }

export function hide() {
  $("patches").hidden = true;
  shown = null;
}

// pictures: data: URLs, as many as patches.images, in their order.
export function show(patches, pictures) {
  if (!patches?.images.length || patches.images.length !== pictures.length || !patches.layers.length) return hide();
  shown = { patches, pictures, which: 0 };
  $("patches").hidden = false;
  $("layer").max = patches.layers.length;
  $("layer").value = 0;
  const buttons = pictures.map((_, i) => {
    const one = element("button", { textContent: `Picture ${i + 1}`, onclick: () => choose(i) });
    one.setAttribute("aria-pressed", i === 0);
    return one;
  });
  $("which").replaceChildren(...(buttons.length > 1 ? buttons : []));
  draw();
}

function choose(which) {
  shown.which = which;
  [...$("which").children].forEach((one, i) => one.setAttribute("aria-pressed", i === which));
  draw();
}

// Shares of the patches, 0 to 1: of one layer, or the mean of all.
function shares(image, layer) {
  if (layer > 0) return image.share[layer - 1].map((percent) => percent / 100);
  const sum = image.share[0].map(() => 0);
  for (const row of image.share) row.forEach((percent, i) => (sum[i] += percent / 100 / image.share.length));
  return sum;
}

async function draw() {
  const mine = shown;
  const { patches, pictures, which } = mine;
  const image = patches.images[which];
  const layer = Number($("layer").value);
  const picture = new Image();
  picture.src = pictures[which];
  await picture.decode().catch(() => {});
  if (shown !== mine || which !== mine.which || !picture.width) return;

  const canvas = $("canvas");
  const side = Math.max(picture.width, picture.height);
  const [width, height] = image.padded ? [side, side] : [picture.width, picture.height];
  const scale = 560 / Math.max(width, height);
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  const context = canvas.getContext("2d");
  const [w, h] = [picture.width * scale, picture.height * scale];
  context.drawImage(picture, (canvas.width - w) / 2, (canvas.height - h) / 2, w, h);

  const share = shares(image, layer);
  const [x, y] = [canvas.width / image.columns, canvas.height / image.rows];
  share.forEach((kept, i) => {
    context.fillStyle = `rgba(0, 0, 0, ${(1 - DARKEST) * (1 - kept)})`;
    const [left, top] = [Math.round((i % image.columns) * x), Math.round(Math.floor(i / image.columns) * y)];
    context.fillRect(left, top, Math.round(((i % image.columns) + 1) * x) - left, Math.round((Math.floor(i / image.columns) + 1) * y) - top);
  });
  const mean = share.reduce((a, b) => a + b, 0) / share.length;
  const name = layer ? `layer ${patches.layers[layer - 1]}` : "all layers";
  $("layer-out").value = layer ? patches.layers[layer - 1] : "all";
  $("patches-out").textContent = `Picture ${which + 1}, ${name}: ${(100 * mean).toFixed(0)} % of ${share.length} patches kept`;
}

$("layer").addEventListener("input", () => shown && draw());

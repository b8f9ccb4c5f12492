// Pictures and documents of the message that is being written: added, dropped or pasted.

import { $, element, icon, iconButton } from "./show.js";

const TAKEN = /^image\/(png|jpeg|webp|gif|bmp)$/; // by the server; other pictures become JPEG here, if the browser knows them
const SIDE = 2048; // pixels: models read no more
const PICTURE_BYTES = 4 << 20;
const FILE_BYTES = 40 << 20;
const THUMB = 96;
let attached = []; // { url, name, note, thumb } of a picture; { url, name, file: true } of a document
let refused = () => {};

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function drawn(bitmap, most, quality) {
  const scale = Math.min(1, most / Math.max(bitmap.width, bitmap.height));
  const size = { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) };
  const canvas = element("canvas", size);
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return { ...size, url: canvas.toDataURL("image/jpeg", quality) };
}

async function picture(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
  } catch {
    throw new Error(`${file.name} cannot be read as a picture: it is damaged, or of a kind that this browser does not know.`);
  }
  const small = Math.max(bitmap.width, bitmap.height) <= SIDE && file.size <= PICTURE_BYTES && TAKEN.test(file.type);
  const made = { name: file.name, note: "", thumb: drawn(bitmap, THUMB, 0.8).url };
  if (small) made.url = await dataUrl(file);
  else {
    const { url, width, height } = drawn(bitmap, SIDE, 0.92);
    made.url = url;
    const [from, to] = [`${bitmap.width} × ${bitmap.height}`, `${width} × ${height}`];
    if (from !== to) made.note = `scaled from ${from} to ${to} pixels`;
  }
  bitmap.close();
  return made;
}

async function attachment(file) {
  if (file.type.startsWith("image/")) return picture(file);
  if (!/\.pdf$/i.test(file.name) && file.type !== "application/pdf") throw new Error(`${file.name} is neither a picture nor a PDF.`);
  if (file.size > FILE_BYTES) throw new Error(`${file.name} is larger than ${FILE_BYTES >> 20} MiB.`);
  const document = new Blob([file], { type: "application/pdf" }); // some systems do not know what it is
  return { url: await dataUrl(document), name: file.name, file: true };
}

export async function add(files) {
  const wrong = [];
  for (const file of files) {
    try {
      attached.push(await attachment(file));
    } catch (problem) {
      wrong.push(problem.message);
    }
  }
  if (wrong.length) refused(wrong.join(" "));
  draw();
}

function draw() {
  const items = attached.map((one, i) => {
    const remove = () => {
      attached.splice(i, 1);
      draw();
      $("text").focus();
    };
    const shown = one.file
      ? element("span", { className: "chip" }, icon("file"), one.name)
      : element("img", { src: one.url, alt: `${one.name}${one.note && `, ${one.note}`}`, title: one.note || one.name });
    return element("li", {}, shown, iconButton("close", `Remove ${one.name}`, remove, { className: "round", title: "Remove" }));
  });
  $("attached").replaceChildren(...items);
}

export const count = () => attached.length;

// The pictures and files of the message, which has none after that.
export function take() {
  const out = { pictures: attached.filter((one) => !one.file), files: attached.filter((one) => one.file) };
  attached = [];
  draw();
  return out;
}

export function put({ pictures = [], files = [] }) {
  attached = [...files, ...pictures.map(({ kept, ...one }) => one)];
  draw();
}

function dropped(data) {
  const files = [...data.files];
  if (files.length) return add(files);
  const text = data.getData("text/plain");
  if (data.types.includes("text/uri-list") || !text) {
    refused("This page fetches nothing from other sites. Save the picture, and drop the file.");
  } else $("text").setRangeText(text, $("text").selectionStart, $("text").selectionEnd, "end");
}

// refuse: called with a line about files that cannot be used.
export function listen(refuse) {
  refused = refuse;
  const main = document.querySelector("main");
  $("attach").onclick = () => $("file").click();
  $("file").onchange = () => add([...$("file").files]).then(() => ($("file").value = ""));
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length) {
      event.preventDefault();
      add(files);
    }
  });
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    main.classList.add("dropping");
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget ?? main.classList.remove("dropping"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    main.classList.remove("dropping");
    dropped(event.dataTransfer);
  });
}

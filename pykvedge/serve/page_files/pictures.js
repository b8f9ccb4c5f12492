// Pictures of the message that is being written: attached, dropped or pasted.

import { $, element } from "./show.js";

const MOST_BYTES = 20 << 20;
const KINDS = /^image\/(png|jpeg|webp|gif|bmp)$/;
let attached = [];
let refused = () => {};

function url(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function add(files) {
  for (const file of files) {
    if (!KINDS.test(file.type)) refused(`${file.name} is no picture that can be used: PNG, JPEG, WebP, GIF or BMP.`);
    else if (file.size > MOST_BYTES) refused(`${file.name} has more than ${MOST_BYTES >> 20} MiB.`);
    else attached.push(await url(file));
  }
  draw();
}

function draw() {
  const items = attached.map((source, i) => {
    const drop = element("button", { type: "button", textContent: "×", onclick: () => { attached.splice(i, 1); draw(); } });
    drop.setAttribute("aria-label", `Remove picture ${i + 1}`);
    return element("li", {}, element("img", { src: source, alt: `Picture ${i + 1}` }), drop);
  });
  $("attached").replaceChildren(...items);
}

export const count = () => attached.length;

export function take() {
  const all = attached;
  attached = [];
  draw();
  return all;
}

// refuse: called with a line about a file that is no picture.
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
    add([...event.dataTransfer.files]);
  });
}

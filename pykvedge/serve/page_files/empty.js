// What is shown before the first message: examples to click.

import * as attached from "./attached.js";
import { $, element } from "./show.js";

const SCENE = [
  "Ask about a drawn scene",
  "This small packaged model knows drawn scenes only, no photographs. A question below asks about this scene.",
  ["What is the code?", "How many circles are there?", "What colour is the triangle?", "Describe the image."],
];
const PICTURE = [
  "Ask about a picture or a PDF",
  "Add it, drop it here or paste it. It stays on this machine and the server's.",
  ["Describe this picture.", "Read the text in this picture.", "What is unusual here?"],
];
const TEXT = [
  "Ask something",
  "This model reads no pictures.",
  ["Explain how a KV cache works.", "Write a short poem about the sea."],
];

async function scene() {
  const file = await fetch("page/scene.png").then((response) => response.blob());
  await attached.add([new File([file], "scene.png", { type: "image/png" })]);
}

// about: what /v1/models says of the model under `kvedge`. send: sends the message that is written.
export function empty(about, send) {
  const packaged = about.packaged && about.images;
  const ask = async (question) => {
    $("text").value = question;
    if (packaged && !attached.count()) await scene();
    if (packaged || !about.images) return send();
    $("text").focus();
    if (!attached.count()) $("file").click();
  };
  const [head, words, questions] = packaged ? SCENE : about.images ? PICTURE : TEXT;
  const buttons = questions.map((text) => element("button", { textContent: text, onclick: () => ask(text) }));
  const image = packaged
    ? { src: "page/scene.png", alt: "The scene: three circles, a triangle and a code" }
    : { src: "page/icon.svg", alt: "", className: "mark" };
  return element(
    "section",
    { className: "empty" },
    element("img", image),
    element("h2", { textContent: head }),
    element("p", { className: "quiet", textContent: words }),
    element("div", { className: "examples" }, ...buttons),
  );
}

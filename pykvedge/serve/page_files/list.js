// The conversations at the side: a picture, a title and a time of each that has begun.

import { $, ago, element, icon, iconButton } from "./show.js";

export function title({ messages }) {
  const first = messages[0];
  if (!first) return "New conversation";
  return first.text.slice(0, 80) || first.files?.[0]?.name || "A picture";
}

// choose, forget: what is done with a conversation.
export function draw(conversations, open, choose, forget) {
  const items = conversations.filter((one) => one.messages.length).sort((a, b) => b.at - a.at).map((one) => {
    const thumb = one.messages.flatMap((said) => said.pictures ?? [])[0];
    const picture = thumb
      ? element("img", { className: "thumb", src: thumb.thumb ?? thumb.url, alt: "" })
      : element("span", { className: "thumb" }, icon("talk"));
    const time = element("time", { dateTime: new Date(one.at).toISOString(), textContent: ago(one.at) });
    const words = element("span", { className: "words" }, element("span", { textContent: title(one) }), time);
    const name = element("button", { className: "title", onclick: () => choose(one) }, picture, words);
    if (one === open) name.setAttribute("aria-current", "true");
    const drop = iconButton("delete", `Delete ${title(one)}`, () => forget(one), { title: "Delete" });
    return element("li", {}, name, drop);
  });
  $("conversations").replaceChildren(...items);
}

// What the server takes of memory, as it changes, and the conversations that it keeps.

import * as api from "./api.js";
import { $, bar, bytes, element, percent, perSecond } from "./show.js";

const AGAIN_MS = 3000;

export async function follow() {
  for (;;) {
    try {
      for await (const now of api.watch("v1/kvedge/events")) told(now);
    } catch (error) {
      if (error.status === 401) return;
    }
    $("requests").textContent = "the server does not answer";
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

function told({ memory }) {
  const held = memory.kv_bytes + memory.parked_bytes;
  const file = memory.kv_file_bytes ? `, ${bytes(memory.kv_file_bytes)} in a file` : "";
  $("all").textContent = `${bytes(held)} of ${bytes(memory.limit_bytes)}${file}`;
  bar("all-bar", held / memory.limit_bytes);
  $("private").textContent = bytes(memory.private_bytes);
  $("requests").textContent = `${memory.running} now, ${memory.waiting} waiting`;
}

// What the last answer of a conversation kept and took; null where there is none yet.
export function last(said) {
  const kv = said?.figures?.kv;
  const share = kv?.full_bytes ? kv.kept_bytes / kv.full_bytes : 0;
  $("kept").textContent = share ? `${bytes(kv.kept_bytes)} of ${bytes(kv.full_bytes)}, ${percent(share)}` : "–";
  bar("kept-bar", share);
  $("speed").textContent = perSecond(said?.figures);
  $("first").textContent = said?.firstS ? `${said.firstS.toFixed(2)} s` : "–";
}

export async function sessions() {
  const { sessions: found } = await api.read("v1/kvedge/sessions");
  const rows = found.map((one) => {
    const end = element("button", { className: "plain", textContent: one.state === "parked" ? "Forget" : "End" });
    end.setAttribute("aria-label", `${end.textContent} the conversation of ${one.tokens ?? "?"} tokens`);
    end.onclick = () => api.remove(`v1/kvedge/sessions/${one.id}`).catch(() => {}).finally(sessions);
    const cells = [one.where ?? one.state, one.tokens ?? "", (one.bytes / (1 << 20)).toFixed(2)];
    return element("tr", {}, ...cells.map((text) => element("td", { textContent: text })), element("td", {}, end));
  });
  if (!rows.length) rows.push(element("tr", {}, element("td", { colSpan: 4, textContent: "none" })));
  $("sessions").hidden = false;
  $("sessions").tBodies[0].replaceChildren(...rows);
}

// The page: a list of conversations, the one that is open, and the message that is written.

import * as api from "./api.js";
import * as choice from "./choice.js";
import * as meter from "./meter.js";
import * as patches from "./patches.js";
import * as pictures from "./pictures.js";
import * as store from "./store.js";
import { $, element, message } from "./show.js";

let conversations = [];
let open = null; // the conversation that is shown
let answering = null; // the AbortController of the answer that is being written

function fresh() {
  return { id: crypto.randomUUID?.() ?? String(Date.now()), at: Date.now(), messages: [], choice: null };
}

const title = (c) => c.messages[0]?.text.slice(0, 60) || (c.messages.length ? "A picture" : "New conversation");

// ------------------------------------------------------------------------------------------------ what is shown

function list() {
  const items = conversations.map((c) => {
    const name = element("button", { className: "title", textContent: title(c), onclick: () => choose(c) });
    if (c === open) name.setAttribute("aria-current", "true");
    const drop = element("button", { className: "plain", textContent: "×", onclick: () => forget(c) });
    drop.setAttribute("aria-label", `Delete ${title(c)}`);
    return element("li", {}, name, drop);
  });
  $("conversations").replaceChildren(...items);
}

function render() {
  list();
  const log = $("log");
  const shown = open.messages.map((said, i) => message(said, actions(said, i)));
  if (!shown.length) shown.push(element("p", { className: "empty", textContent: "Drop a picture here and ask about it." }));
  log.replaceChildren(...shown);
  log.scrollTop = log.scrollHeight;
  const last = open.messages.findLast((said) => said.figures);
  meter.kept(last?.figures ?? null);
  drawn(open.messages.findLastIndex((said) => said.patches));
}

function actions(said, i) {
  const out = [];
  if (said.role !== "assistant") return out;
  out.push(["Copy", () => navigator.clipboard?.writeText(said.text)]);
  if (i === open.messages.length - 1) out.push(["Answer again", again]);
  if (said.patches) out.push(["Kept patches", () => drawn(i)]);
  return out;
}

function drawn(i) {
  if (i < 0) return patches.hide();
  const { patches: found, read } = open.messages[i];
  patches.show(found, open.messages.slice(read, i).flatMap((said) => said.pictures ?? []));
}

function choose(c) {
  answering?.abort();
  open = c;
  error(null);
  choice.restore(c.choice);
  render();
  $("text").focus();
}

async function forget(c) {
  conversations = conversations.filter((one) => one !== c);
  await store.remove(c.id);
  if (c === open) start();
  else list();
}

function start() {
  if (open && !open.messages.length && conversations.includes(open)) return choose(open);
  const c = fresh();
  conversations.unshift(c);
  choose(c);
}

function error(what) {
  $("error").hidden = !what;
  $("error").firstElementChild.textContent = what ?? "";
  $("again").hidden = open?.messages.at(-1)?.role !== "user";
}

function progress(told) {
  $("progress").hidden = !told;
  if (!told) return;
  $("doing").textContent = told.what;
  if (told.share > 0) $("bar").value = told.share;
  else $("bar").removeAttribute("value");
}

// ------------------------------------------------------------------------------------------------ asking

function wire(said) {
  if (!said.pictures?.length) return { role: said.role, content: said.text };
  const seen = said.pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: said.role, content: [...seen, { type: "text", text: said.text }] };
}

function submit(event) {
  event?.preventDefault();
  const text = $("text").value;
  if (!open || answering || (!text.trim() && !pictures.count())) return; // nothing is open before the server has answered
  $("text").value = "";
  open.messages.push({ role: "user", text, pictures: pictures.take() });
  answer();
}

function again() {
  if (answering) return;
  if (open.messages.at(-1)?.role === "assistant") open.messages.pop();
  if (open.messages.length) answer();
}

async function answer() {
  const conversation = open;
  const said = { role: "assistant", text: "" };
  conversation.choice = choice.chosen();
  conversation.at = Date.now();
  const system = conversation.choice.system ? [{ role: "system", content: conversation.choice.system }] : [];
  const body = { messages: [...system, ...conversation.messages.map(wire)], ...choice.fields(conversation.choice) };
  answering = new AbortController();
  const mine = answering;
  error(null);
  render();
  const view = message(said);
  $("log").append(view);
  busy(true);
  let failed = null;
  try {
    await written(conversation, said, view, api.chat(body, mine.signal));
  } catch (problem) {
    failed = problem;
  }
  answering = null;
  busy(false);
  const stopped = failed?.name === "AbortError";
  if (said.text || (failed === null && said.figures)) conversation.messages.push(said);
  await store.put(conversation);
  if (conversation === open) {
    render();
    error(failed && !stopped ? failed.message : null);
  }
  if (failed?.status === 401) ask();
}

// Puts an answer where it is seen, as it comes.
async function written(conversation, said, view, chunks) {
  const [text, thought, began] = [view.querySelector(".text"), view.querySelector(".thought"), performance.now()];
  let [tokens, since] = [0, 0];
  meter.first(null);
  for await (const chunk of chunks) {
    if (chunk.kvedge?.progress) progress(chunk.kvedge.progress);
    const delta = chunk.choices[0]?.delta;
    if (delta?.content || delta?.reasoning_content) {
      progress(null);
      since ||= performance.now();
      if (!tokens++) meter.first((since - began) / 1000);
      if (delta.reasoning_content) {
        said.thought = (said.thought ?? "") + delta.reasoning_content;
        thought.textContent = said.thought;
        thought.parentElement.hidden = false;
        thought.parentElement.open = true;
      } else {
        said.text += delta.content;
        text.textContent = said.text;
        thought.parentElement.open = false;
      }
      meter.speed(tokens, (performance.now() - since) / 1000);
      follow();
    }
    if (chunk.usage) settle(conversation, said, chunk.kvedge[0]);
  }
}

function settle(conversation, said, figures) {
  const { patches: found, ...rest } = figures;
  said.figures = rest;
  if (!found?.images.length) return;
  said.patches = found;
  // the pictures that were read now are the last ones; those before lay in rows that the server had
  let [at, missing] = [conversation.messages.length, found.images.length];
  while (at > 0 && missing > 0) missing -= conversation.messages[--at].pictures?.length ?? 0;
  said.read = at;
}

function follow() {
  const log = $("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

function busy(on) {
  $("send").disabled = on;
  $("stop").hidden = !on;
  $("log").setAttribute("aria-busy", on);
  progress(on ? { what: "waiting", share: 0 } : null);
}

function ask() {
  $("key-dialog").showModal();
}

// ------------------------------------------------------------------------------------------------ beginning

function listen() {
  $("composer").onsubmit = submit;
  $("stop").onclick = () => answering?.abort();
  $("again").onclick = again;
  $("new").onclick = start;
  $("look").onclick = () => meter.sessions().catch((problem) => error(problem.message));
  $("key-dialog").onclose = () => {
    api.setKey($("key").value);
    $("key").value = "";
    begin();
  };
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && answering?.abort());
  pictures.listen(error);
}

async function begin() {
  try {
    const [models, methods] = await Promise.all([api.read("v1/models"), api.read("v1/kvedge/methods")]);
    const model = models.data[0];
    const sees = model.kvedge.images;
    $("attach").hidden = !sees;
    choice.fill(model, methods.methods, () => error(null));
    conversations = await store.all();
    start();
    $("model").textContent = `${model.id}, ${model.kvedge.n_ctx} tokens${sees ? "" : ", sees no pictures"}`;
    meter.follow();
  } catch (problem) {
    if (problem.status === 401) ask();
    else error(problem.message);
  }
}

listen();
begin();

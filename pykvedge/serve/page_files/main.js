// The page: a list of conversations, the one that is open, and the message that is written.

import * as api from "./api.js";
import { ask } from "./asking.js";
import * as attached from "./attached.js";
import * as choice from "./choice.js";
import { empty } from "./empty.js";
import * as list from "./list.js";
import { message, write } from "./message.js";
import * as meter from "./meter.js";
import { $, element, iconButton, touches } from "./show.js";
import * as store from "./store.js";

let conversations = [];
let open = null; // the conversation that is shown
let answering = null; // the AbortController of the answer that is being written
let editing = -1; // the number of the message that is changed
let draft = { text: "" }; // what was written before that
let about = {}; // the model

function fresh() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, at: Date.now(), messages: [], choice: null };
}

// ------------------------------------------------------------------------------------------------ what is shown

// stays: what is seen of the conversation stays in its place; else its end is shown.
function render(stays = false) {
  list.draw(conversations, open, choose, forget);
  $("heading").textContent = list.title(open);
  document.title = open.messages.length ? `${list.title(open)} – kvedge` : "kvedge";
  const log = $("log");
  const { scrollTop } = log;
  const shown = open.messages.map((said, i) => message(said, actions(said, i)));
  log.replaceChildren(...(shown.length ? shown : [empty(about, submit)]));
  log.scrollTop = stays ? scrollTop : log.scrollHeight;
  meter.last(open.messages.findLast((said) => said.figures));
}

function actions(said, i) {
  if (answering) return [];
  const mine = said.role === "user";
  const out = i === open.messages.length - 1 ? [["again", mine ? "Answer this" : "Answer again", again]] : [];
  if (mine) out.push(["edit", "Change this message", () => edit(i)], ["delete", "Delete this message and its answer", () => erase(i)]);
  return out;
}

function error(problem) {
  const last = open?.messages.at(-1)?.role === "user";
  // what the server refuses, it refuses again
  const refused = problem?.status >= 400 && problem.status < 429 && problem.status !== 401;
  $("error").hidden = !problem;
  $("error").firstElementChild.textContent = problem?.message ?? problem ?? "";
  $("again").hidden = !last || answering !== null;
  $("again").textContent = refused ? "Change the message" : "Try again";
  $("again").onclick = refused ? () => edit(open.messages.length - 1) : again;
  if (problem) $("log").scrollTop = $("log").scrollHeight;
}

function progress(told) {
  $("progress").hidden = !told;
  if (!told) return;
  $("doing").textContent = told.what;
  if (told.share > 0) $("bar").value = told.share;
  else $("bar").removeAttribute("value");
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  $("log").setAttribute("aria-busy", on);
  progress(on ? { what: "waiting", share: 0 } : null);
}

// On a screen that is touched, focus would open the keyboard.
function focusText() {
  if (!touches.matches) $("text").focus();
}

// Says what was changed, with a way back, which takes the place of a button that is gone.
function offer(what, undo) {
  const close = () => $("undo").replaceChildren();
  const back = element("button", { type: "button", textContent: "Undo", onclick: () => { close(); undo(); } });
  $("undo").replaceChildren(element("span", { textContent: what }), back, iconButton("close", "Close this note", close));
  back.focus({ focusVisible: false });
}

// ------------------------------------------------------------------------------------------------ conversations

function choose(c) {
  answering?.abort();
  open = c;
  $("nav").hidePopover();
  leave();
  error(null);
  choice.restore(c.choice);
  render();
  focusText();
}

function forget(c) {
  if (c === open) answering?.abort();
  conversations = conversations.filter((one) => one !== c);
  store.remove(c.id);
  if (c === open) start();
  else render();
  if (!c.messages.length) return;
  offer(`Deleted: ${list.title(c)}`, () => {
    conversations.push(c);
    store.put(c);
    choose(c);
  });
}

function start() {
  $("undo").replaceChildren();
  let c = conversations.find((one) => !one.messages.length);
  if (!c) conversations.push((c = fresh()));
  c.at = Date.now();
  choose(c);
}

// Puts other messages in place of those of the open conversation, until somebody takes it back.
function change(messages, what) {
  const [c, before] = [open, open.messages];
  const put = (these) => {
    answering?.abort();
    c.messages = these;
    store.put(c);
    if (c === open) render(true);
  };
  put(messages);
  offer(what, () => {
    leave();
    put(before);
  });
}

function erase(i) {
  const n = open.messages[i + 1]?.role === "assistant" ? 2 : 1;
  error(null);
  leave();
  change(open.messages.toSpliced(i, n), n > 1 ? "A message and its answer were deleted." : "A message was deleted.");
}

function edit(i) {
  if (i < 0 || answering) return;
  if (editing < 0) draft = { text: $("text").value, ...attached.take() };
  editing = i;
  error(null);
  $("editing").hidden = false;
  $("text").value = open.messages[i].text;
  attached.put(open.messages[i]);
  $("text").focus();
}

// Ends the change of an earlier message, and brings back what was written before.
function leave() {
  if (editing < 0) return;
  editing = -1;
  $("editing").hidden = true;
  $("text").value = draft.text;
  attached.put(draft);
}

// ------------------------------------------------------------------------------------------------ asking

function submit(event) {
  event?.preventDefault();
  const text = $("text").value;
  if (!open || answering || (!text.trim() && !attached.count())) return; // nothing is open before the server has answered
  const said = { role: "user", text, ...attached.take() };
  $("undo").replaceChildren();
  if (editing < 0) open.messages.push(said);
  else change([...open.messages.slice(0, editing), said], "A message was changed, and what followed it is gone.");
  $("text").value = "";
  leave();
  focusText();
  answer();
}

function again() {
  if (answering) return;
  if (open.messages.at(-1)?.role === "assistant") change(open.messages.slice(0, -1), "The answer is replaced.");
  if (open.messages.length) answer();
}

async function answer() {
  const [conversation, messages, said] = [open, open.messages, { role: "assistant", text: "" }];
  conversation.choice = choice.chosen();
  conversation.at = Date.now();
  const mine = (answering = new AbortController());
  error(null);
  render();
  store.put(conversation);
  const view = message(said);
  view.classList.add("open");
  $("log").append(view);
  $("log").scrollTop = $("log").scrollHeight;
  busy(true);
  const speak = speaker(said);
  let failed = null;
  try {
    await ask(conversation, said, mine.signal, shown(said, view, speak));
  } catch (problem) {
    failed = problem;
  }
  said.stopped = failed?.name === "AbortError" || undefined;
  if (said.text || said.figures) messages.push(said);
  if (conversations.includes(conversation)) store.put(conversation);
  if (answering === mine) {
    answering = null;
    busy(false);
  }
  render();
  if (messages === open.messages) {
    speak(true);
    error(failed && !said.stopped ? failed : null);
  }
  if (failed?.status === 401) needKey();
}

// Returns what draws an answer as it comes, once for each picture of the screen at most.
function shown(said, view, speak) {
  let waits = false;
  return (step) => {
    progress(step);
    if (step || waits) return;
    waits = true;
    requestAnimationFrame(() => {
      waits = false;
      write(view, said);
      speak(false);
      const log = $("log");
      if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
    });
  };
}

// Returns what tells screen readers the paragraphs of an answer, each once it is complete.
function speaker(said) {
  let told = 0;
  return (whole) => {
    const end = whole ? said.text.length : said.text.lastIndexOf("\n\n");
    if (end > told) $("live").textContent = said.text.slice(told, end);
    told = Math.max(told, end);
  };
}

// ------------------------------------------------------------------------------------------------ beginning

function needKey() {
  $("key-wrong").hidden = !api.hasKey();
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

function pressed(event) {
  if (event.key === "Escape" && !event.defaultPrevented) answering?.abort();
  const typing = event.target.closest?.("input, textarea, select, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "?") $("help-dialog").showModal();
  if (event.key === "/") {
    event.preventDefault();
    $("text").focus();
  }
}

function typed(event) {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey && !touches.matches) submit(event);
  if (event.key !== "ArrowUp" || $("text").value || attached.count() || !open) return;
  edit(open.messages.findLastIndex((said) => said.role === "user"));
}

// The message box is as high as its text, where the browser does not see to it.
function grow({ target }) {
  target.style.height = "auto";
  target.style.height = `${target.scrollHeight}px`;
}

function listen() {
  $("composer").onsubmit = submit;
  $("stop").onclick = () => answering?.abort();
  $("keep").onclick = leave;
  $("new").onclick = start;
  $("help").onclick = () => $("help-dialog").showModal();
  $("look").onclick = () => meter.sessions().catch(error);
  $("key-dialog").onclose = () => {
    api.setKey($("key").value);
    $("key").value = "";
    begin();
  };
  $("text").addEventListener("keydown", typed);
  if (!CSS.supports("field-sizing", "content")) $("text").addEventListener("input", grow);
  document.addEventListener("keydown", pressed);
  for (const query of ["(max-width: 74.99rem)", "(max-width: 47.99rem)"]) {
    matchMedia(query).onchange = () => ["nav", "side"].forEach((id) => $(id).hidePopover()); // they stand beside the page now
  }
  attached.listen(error);
  store.listen((trouble) => ($("storage").textContent = trouble));
}

async function begin() {
  try {
    const [models, methods] = await Promise.all([api.read("v1/models"), api.read("v1/kvedge/methods")]);
    const [model] = models.data;
    about = model.kvedge;
    $("attach").hidden = !about.images;
    $("text").placeholder = about.images ? "Ask about a picture or a PDF" : "Ask something";
    choice.fill(model, methods, () => error(null));
    conversations = await store.all();
    start();
    const drawn = about.packaged ? ", knows drawn scenes only" : "";
    const sees = about.images ? drawn : ", reads no pictures";
    $("model").textContent = `${model.id}, ${about.n_ctx.toLocaleString("en")} tokens${sees}`;
    meter.follow();
  } catch (problem) {
    if (problem.status === 401) needKey();
    else error(problem);
  }
}

listen();
begin();

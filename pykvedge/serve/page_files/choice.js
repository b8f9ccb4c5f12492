// What is kept, and how answers are made: the controls at the side, as fields of a request.

import { $, element, percent } from "./show.js";

// method, budget, and images: { ratio } or { pairs }, that hold where a request says nothing; about: what methods do
let server = null;
let changed = () => {};

const outputs = { budget: percent, "image-tokens": percent, temperature: (value) => value.toFixed(1) };

// Until a slider is moved the server's own value holds, which may lie between two of the slider's.
const moved = (id) => Boolean($(id).dataset.moved);

function put(id, value, other) {
  $(id).value = value ?? other;
  if (value === null) delete $(id).dataset.moved;
  else $(id).dataset.moved = "yes";
}

function tell() {
  const { method, budget, images } = server;
  for (const [id, form] of Object.entries(outputs)) $(`${id}-out`).value = form(Number($(id).value));
  const own = $("method").value === method && !moved("budget");
  if (own) $("budget-out").value = budget > 1 ? `${budget} pairs` : percent(budget);
  const given = images.pairs ? `${images.pairs} tokens` : percent(images.ratio);
  if (!moved("image-tokens")) $("image-tokens-out").value = given;
  $("budget").disabled = $("method").value === "full";
  if ($("budget").disabled) $("budget-out").value = "all";
  $("method-about").textContent = sentence(server.about[$("method").value]);
}

const sentence = (text) => (text ? `${text[0].toUpperCase()}${text.slice(1)}.` : "");

// A method with the first words of what it does.
function option(name, about, chosen, why = "") {
  const made = element("option", { value: name, disabled: Boolean(why), title: why, selected: chosen });
  made.textContent = about ? `${name}: ${about.split(/[,;(]/)[0].trim()}` : name;
  return made;
}

// model, methods: what /v1/models and /v1/kvedge/methods say. change: called when something was chosen.
export function fill(model, { methods, unavailable, summaries, default: plan }, change) {
  const { method, budget } = model.kvedge;
  server = { method, budget, images: plan.image_tokens, about: summaries };
  changed = change;
  const options = methods.map((name) => option(name, summaries[name], name === method));
  const barred = Object.entries(unavailable).map(([name, why]) => option(name, "not with this model", false, why));
  $("method").replaceChildren(...options, ...barred);
  if (budget <= 1) $("budget").value = budget;
  $("image-tokens").value = server.images.ratio ?? 1;
  for (const id of ["method", "budget", "image-tokens", "temperature", "most", "system"]) {
    $(id).addEventListener("input", () => {
      if (["budget", "image-tokens"].includes(id)) $(id).dataset.moved = "yes";
      tell();
      changed();
    });
  }
  tell();
}

// What was chosen, as a conversation remembers it.
export function chosen() {
  const other = $("method").value !== server.method && server.budget <= 1;
  const budget = moved("budget") || other ? Number($("budget").value) : null;
  return {
    method: $("method").value, budget, imageTokens: moved("image-tokens") ? Number($("image-tokens").value) : null,
    temperature: Number($("temperature").value), most: Number($("most").value) || null, system: $("system").value,
  };
}

export function restore(choice) {
  if (!choice) return;
  $("method").value = choice.method;
  put("budget", choice.budget, Math.min(server.budget, 1));
  put("image-tokens", choice.imageTokens, server.images.ratio ?? 1);
  $("temperature").value = choice.temperature;
  $("most").value = choice.most ?? "";
  $("system").value = choice.system;
  tell();
}

// The fields of a request that follow from a choice.
export function fields(choice) {
  const kvedge = { method: choice.method, progress: true, patches: true };
  if (choice.budget !== null && choice.method !== "full") kvedge.budget = choice.budget;
  const { imageTokens } = choice;
  if (imageTokens !== null && imageTokens !== server.images.ratio) kvedge.image_tokens = imageTokens;
  const out = { temperature: choice.temperature, kvedge };
  if (choice.most) out.max_tokens = choice.most;
  return out;
}

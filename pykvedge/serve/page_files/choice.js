// What is kept, and how answers are made: the controls at the side, as fields of a request.

import { $, element, percent } from "./show.js";

let server = null; // { method, budget } that hold where a request says nothing; about: what each method does
let changed = () => {};

const outputs = { budget: percent, "image-tokens": percent, temperature: (value) => value.toFixed(1) };

function tell() {
  for (const [id, form] of Object.entries(outputs)) $(`${id}-out`).value = form(Number($(id).value));
  const pairs = $("method").value === server.method && server.pairs && !$("budget").dataset.moved;
  if (pairs) $("budget-out").value = `${server.budget} pairs`;
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
export function fill(model, { methods, unavailable, summaries }, change) {
  const { method, budget } = model.kvedge;
  server = { method, budget, pairs: budget > 1, about: summaries };
  changed = change;
  const options = methods.map((name) => option(name, summaries[name], name === method));
  const barred = Object.entries(unavailable).map(([name, why]) => option(name, "not with this model", false, why));
  $("method").replaceChildren(...options, ...barred);
  if (!server.pairs) $("budget").value = server.budget;
  for (const id of ["method", "budget", "image-tokens", "temperature", "most", "system"]) {
    $(id).addEventListener("input", () => {
      if (id === "budget") $("budget").dataset.moved = "yes";
      tell();
      changed();
    });
  }
  tell();
}

// What was chosen, as a conversation remembers it.
export function chosen() {
  const budget = $("budget").dataset.moved || !server.pairs ? Number($("budget").value) : null;
  return {
    method: $("method").value, budget, imageTokens: Number($("image-tokens").value),
    temperature: Number($("temperature").value), most: Number($("most").value) || null, system: $("system").value,
  };
}

export function restore(choice) {
  if (!choice) return;
  $("method").value = choice.method;
  if (choice.budget !== null) $("budget").value = choice.budget;
  if (choice.budget !== null && server.pairs) $("budget").dataset.moved = "yes";
  $("image-tokens").value = choice.imageTokens;
  $("temperature").value = choice.temperature;
  $("most").value = choice.most ?? "";
  $("system").value = choice.system;
  tell();
}

// The fields of a request that follow from a choice.
export function fields(choice) {
  const kvedge = { method: choice.method, progress: true, patches: true };
  if (choice.budget !== null && choice.method !== "full") kvedge.budget = choice.budget;
  if (choice.imageTokens < 1) kvedge.image_tokens = choice.imageTokens;
  const out = { temperature: choice.temperature, kvedge };
  if (choice.most) out.max_tokens = choice.most;
  return out;
}

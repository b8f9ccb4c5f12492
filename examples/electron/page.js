const get = (id) => document.getElementById(id);
let picture = null;

addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", async (event) => {
  event.preventDefault();
  const [file] = event.dataTransfer.files;
  if (!file) return;
  picture = await file.arrayBuffer();
  URL.revokeObjectURL(get("picture").src);
  get("picture").src = URL.createObjectURL(file);
  get("picture").hidden = false;
  get("hint").hidden = true;
});
get("form").addEventListener("submit", (event) => {
  event.preventDefault();
  get("answer").textContent = "";
  window.kvedge.ask(get("question").value, picture);
});
get("stop").addEventListener("click", () => window.kvedge.stop());
window.kvedge.onTold(({ text, share, error }) => {
  if (text) get("answer").textContent += text;
  if (error) get("answer").textContent = error;
  if (share === undefined) return;
  get("share").value = share;
  get("kept").textContent = `${Math.round(100 * share)}% of the KV cache is kept`;
});

// Conversations lie in the browser: the server keeps rows of numbers, and nothing of what was said.

const STORE = "conversations";
let opened = null;
const remembered = new Map(); // where the browser stores nothing, as in private windows

function open() {
  opened ??= new Promise((resolve) => {
    const asked = indexedDB.open("kvedge", 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE, { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => resolve(null);
  }).catch(() => null);
  return opened;
}

async function run(mode, what, instead) {
  const database = await open();
  if (!database) return instead();
  return new Promise((resolve, reject) => {
    const asked = what(database.transaction(STORE, mode).objectStore(STORE));
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

export async function all() {
  const found = await run("readonly", (s) => s.getAll(), () => [...remembered.values()]);
  return found.sort((a, b) => b.at - a.at);
}

export function put(conversation) {
  return run("readwrite", (s) => s.put(structuredClone(conversation)), () => remembered.set(conversation.id, conversation));
}

export function remove(id) {
  return run("readwrite", (s) => s.delete(id), () => remembered.delete(id));
}

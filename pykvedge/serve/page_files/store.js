// Conversations lie in the browser: the server keeps rows of numbers, and nothing of what was said.

const STORE = "conversations";
const remembered = new Map(); // what the browser did not store, as in private windows
let opened = null;
let noted = () => {};

// note: called with what is wrong, or with nothing once all is well again.
export function listen(note) {
  noted = note;
}

function open() {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open("kvedge", 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE, { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  return opened;
}

async function run(mode, what) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const change = database.transaction(STORE, mode);
    const asked = what(change.objectStore(STORE));
    change.oncomplete = () => resolve(asked.result);
    change.onabort = change.onerror = () => reject(change.error ?? asked.error);
  });
}

function failed(error) {
  const full = error?.name === "QuotaExceededError";
  const no = full ? "has no more room for conversations. Delete some." : "stores no conversations (a private window?).";
  noted(`This browser ${no} What is not stored is gone when you close this tab.`);
}

export async function all() {
  const found = await run("readonly", (s) => s.getAll()).catch((error) => (failed(error), []));
  for (const said of found.flatMap(({ messages }) => messages)) {
    said.pictures &&= said.pictures.map((one) => (one.url ? one : { url: one, name: "" })); // the first versions stored URLs
  }
  return found;
}

export async function put(conversation) {
  try {
    await run("readwrite", (s) => s.put(conversation));
    remembered.delete(conversation.id);
    if (!remembered.size) noted("");
  } catch (error) {
    remembered.set(conversation.id, conversation);
    failed(error);
  }
}

export async function remove(id) {
  remembered.delete(id);
  await run("readwrite", (s) => s.delete(id)).then(() => remembered.size || noted(""), failed);
}

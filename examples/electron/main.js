// npm install && npm start; KVEDGE_PROGRAM says where kvedge is, if it is not on PATH.
import { fileURLToPath } from "node:url";

import { app, BrowserWindow, ipcMain } from "electron";

import { Asking } from "./asking.js";

const here = (name) => fileURLToPath(new URL(name, import.meta.url));
const asking = new Asking();
let closed = false;

app.whenReady().then(() => {
  const window = new BrowserWindow({
    width: 720, height: 640,
    webPreferences: { preload: here("preload.cjs"), contextIsolation: true, sandbox: true, nodeIntegration: false },
  }); // prettier-ignore
  window.webContents.setWindowOpenHandler(() => ({ action: "deny" }));
  window.webContents.on("will-navigate", (event) => event.preventDefault());
  ipcMain.handle("ask", (event, question, picture) =>
    asking.ask(question, picture, (told) => event.sender.isDestroyed() || event.sender.send("told", told)));
  ipcMain.on("stop", () => asking.stop());
  window.loadFile(here("index.html"));
});
app.on("window-all-closed", () => app.quit());
app.on("will-quit", async (event) => {
  if (closed) return;
  event.preventDefault();
  await asking.close();
  closed = true;
  app.quit();
});

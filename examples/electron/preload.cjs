const { contextBridge, ipcRenderer } = require("electron");

contextBridge.exposeInMainWorld("kvedge", {
  ask: (question, picture) => ipcRenderer.invoke("ask", question, picture),
  stop: () => ipcRenderer.send("stop"),
  onTold: (told) => ipcRenderer.on("told", (_, what) => told(what)),
});

export { Client } from "./client.js";
export {
  AccessError, BusyError, IncompleteError, KvedgeError, NotFoundError, PictureError, RequestError, ServerGoneError,
  StartError, TooLongError,
} from "./errors.js"; // prettier-ignore
export { Server, start } from "./server.js";

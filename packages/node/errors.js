// What can go wrong, as classes. Each message is one line that says what to do.

export class KvedgeError extends Error {
  constructor(message, facts = {}) {
    super(message, facts.cause ? { cause: facts.cause } : undefined);
    delete facts.cause;
    Object.assign(this, facts);
    this.name = new.target.name;
  }
}

export class StartError extends KvedgeError {}
export class ServerGoneError extends KvedgeError {}
export class PictureError extends KvedgeError {}
export class IncompleteError extends KvedgeError {}
export class RequestError extends KvedgeError {}
export class AccessError extends RequestError {}
export class NotFoundError extends RequestError {}
export class TooLongError extends RequestError {}
export class BusyError extends RequestError {}

/** Makes the error for a refusal. status: of HTTP; omitted inside a stream, where the type tells. */
export function refused(error, status, retryAfter) {
  const { message = `status ${status}, without a reason`, code = null, param = null, type } = error ?? {};
  const facts = { status: status ?? (type === "server_error" ? 500 : 400), code, param };
  if (retryAfter) facts.retryAfter = Number(retryAfter);
  if (status === 401 || status === 403) return new AccessError(message, facts);
  if (status === 404) return new NotFoundError(message, facts);
  if (status === 413 || code === "context_length_exceeded") return new TooLongError(message, facts);
  if (status === 503 || ["busy", "out_of_memory", "cancelled", "unavailable"].includes(code))
    return new BusyError(message, facts);
  return new RequestError(message, facts);
}

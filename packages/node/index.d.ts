/** Bytes of a picture, the path of its file, or a data: URL. An https: URL needs a server with --allow-https-images. */
export type Picture = string | URL | Uint8Array | ArrayBuffer;

/** A message of OpenAI's chat completions. `images` come before the text. */
export interface Message {
  role: "system" | "developer" | "user" | "assistant" | "tool";
  content?: string | Record<string, unknown>[] | null;
  images?: Picture[];
  reasoning_content?: string;
  tool_calls?: { id: string; type: "function"; function: { name: string; arguments: string } }[];
  tool_call_id?: string;
  name?: string;
}

/** What of a prompt's KV cache is kept. budget: a share of the prompt below or equal to 1, or a number of tokens. */
export interface Plan {
  method?: string;
  budget?: number;
  settings?: Record<string, number | string | boolean>;
  image_tokens?: number;
  pruner?: string;
}

export interface Cancellable {
  /** Stops the call, which then throws the signal's reason (AbortError). */
  signal?: AbortSignal;
}

export interface ChatOptions extends Cancellable {
  /** Pictures of the last message of the user. */
  images?: Picture[];
  /** METHOD or METHOD-BUDGET as text ("snapkv-0.2"), or a plan. By default the server's. */
  plan?: string | Plan;
  /** A JSON schema. The answer follows it and has `data`. */
  schema?: Record<string, unknown>;
  /** The answer's figures say which patches of each picture are kept. */
  patches?: boolean;
  /** Pictures that were left out of a conversation that the server knows keep no pairs; it needs --keep. */
  edited?: "demote";
  /** The stream says how far the prompt was read. */
  progress?: boolean;
  max_tokens?: number;
  temperature?: number;
  top_p?: number;
  top_k?: number;
  seed?: number;
  stop?: string | string[];
  tools?: { type: "function"; function: { name: string; description?: string; parameters?: object } }[];
  tool_choice?: "none" | "auto" | "required" | { type: "function"; function: { name: string } };
  /** Another field of the server's chat completions. */
  [field: string]: unknown;
}

export interface ToolCall {
  id: string;
  name: string;
  /** JSON as text. */
  arguments: string;
}

/** What an answer cost. */
export interface Kept {
  method: string;
  budget: number;
  tokens: { prompt: number; image: number; generated: number; pruned: number; reused: number };
  /** Bytes of keys and values: of the whole prompt, and those that were kept. */
  kv: { full_bytes: number; kept_bytes: number; peak_bytes: number; kept_per_layer: number[]; whole_bytes?: number };
  time: Record<string, number>;
  notes?: string[];
  patches?: unknown;
}

export interface Answer {
  text: string;
  reasoning: string;
  toolCalls: ToolCall[];
  finish: "stop" | "length" | "tool_calls" | null;
  model: string;
  /** For the next call's messages. */
  message: Message;
  usage: { prompt_tokens: number; completion_tokens: number; total_tokens: number;
    prompt_tokens_details: { cached_tokens: number; demoted_images?: number } };
  kept: Kept;
  /** The value of an answer by `schema`. */
  data?: unknown;
}

export type StreamEvent =
  | { type: "progress"; what: string; share: number }
  | { type: "text" | "reasoning"; text: string }
  | { type: "toolCall"; index: number; id: string; name: string; arguments: string }
  | { type: "end"; answer: Answer };

export interface Memory {
  kv_bytes: number;
  kv_file_bytes: number;
  parked_bytes: number;
  parked_conversations: number;
  limit_bytes: number;
  private_bytes: number;
  running: number;
  waiting: number;
}

/** A conversation that is answered or parked. */
export interface Conversation {
  id: string;
  state: string;
  since: number;
  tokens: number;
  bytes: number;
  [more: string]: unknown;
}

export class Client {
  /** url: of a server that runs. key: if it needs one. */
  constructor(url: string | URL, options?: { key?: string });
  readonly url: string;
  /** Answers a question, or a conversation. */
  chat(question: string | Message[], options?: ChatOptions): Promise<Answer>;
  /** Answers piece by piece; the last event has the whole answer. Leaving the loop stops the answer. */
  stream(question: string | Message[], options?: ChatOptions): AsyncGenerator<StreamEvent, void, void>;
  /** Counts the tokens of a prompt, pictures included. */
  tokens(question: string | Message[], options?: ChatOptions): Promise<number>;
  tokenize(text: string, options?: Cancellable): Promise<number[]>;
  info(options?: Cancellable): Promise<{ model: string; nCtx: number; images: boolean; method: string;
    budget: number; kvBytesPerToken: number }>;
  /** Names of the methods that this model can use, with a line each. */
  methods(options?: Cancellable): Promise<{ default: Record<string, unknown>; methods: string[];
    unavailable: Record<string, string>; summaries: Record<string, string> }>;
  /** The whole plan of a choice. */
  plan(choice?: Plan, options?: Cancellable): Promise<Record<string, unknown>>;
  memory(options?: Cancellable): Promise<Memory & { folder_bytes: number }>;
  /** Memory and running conversations: now, and at each change. */
  memoryEvents(options?: Cancellable): AsyncGenerator<{ memory: Memory; sessions: Conversation[] }, void, void>;
  conversations(options?: Cancellable): Promise<Conversation[]>;
  /** Ends an answer, or deletes a parked conversation. */
  deleteConversation(id: string, options?: Cancellable): Promise<void>;
}

export interface StartOptions extends Cancellable {
  /** Path of kvedge. By default KVEDGE_PROGRAM, the bundle `kvedge` in this package, or PATH, in this order. */
  program?: string;
  /** GGUF files. By default the packaged demo model. */
  model?: string;
  mmproj?: string;
  /** More options of `kvedge serve`. */
  args?: (string | number)[];
  /** Added to this process's environment. */
  env?: Record<string, string>;
  /** A key of the server's --key-file. */
  key?: string;
  /** Is given each line of the server's stderr. */
  log?: (line: string) => void;
}

/** A server that is a child of this process, and ends with it. */
export class Server extends Client {
  private constructor();
  readonly model: string;
  readonly pid: number;
  readonly version: string;
  /** Resolves when the server has ended, with the reason. */
  readonly ended: Promise<{ code: number | null; signal: string | null; why: string }>;
  /** Ends the server, and waits until it has ended. Running answers get ten seconds. */
  close(): Promise<void>;
}

/** Starts `kvedge serve`, and waits until its model is loaded. Throws StartError. */
export function start(options?: StartOptions): Promise<Server>;

export class KvedgeError extends Error {}
/** There is no program, or it ended before it served. */
export class StartError extends KvedgeError { readonly exitCode?: number | null }
/** The server ended or cannot be reached. */
export class ServerGoneError extends KvedgeError {}
/** A picture's file cannot be read. */
export class PictureError extends KvedgeError {}
/** An answer by a schema ended early. */
export class IncompleteError extends KvedgeError { readonly answer: Answer }
/** The server refused. */
export class RequestError extends KvedgeError {
  readonly status: number;
  readonly code: string | null;
  readonly param: string | null;
}
/** A key is missing, or may not do this. */
export class AccessError extends RequestError {}
export class NotFoundError extends RequestError {}
/** More than a request or a conversation can hold. */
export class TooLongError extends RequestError {}
/** No memory or no place in the queue; retryAfter: seconds. */
export class BusyError extends RequestError { readonly retryAfter?: number }

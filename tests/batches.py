"""Batches of tokens or image rows for llama.cpp: kvedge's build if pykvedge was imported before, else another."""

import ctypes

import llama_cpp.llama_cpp as llama
import numpy as np

SILENT = llama.llama_log_callback(lambda level, text, data: None)  # llama.cpp calls it until the process ends
EXACT = {
    "type_k": llama.GGML_TYPE_F32, "type_v": llama.GGML_TYPE_F32,
    "flash_attn_type": llama.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}  # fmt: skip


def open_model(path):
    llama.llama_log_set(SILENT, None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    if not model:
        raise SystemExit(f"{path} does not load")
    return model


def open_context(model, **settings):
    """Returns a context with one thread. settings: fields of llama_context_params, for example EXACT."""
    params = llama.llama_context_default_params()
    for name, value in {"n_threads": 1, "n_threads_batch": 1, **settings}.items():
        setattr(params, name, value)
    return llama.llama_init_from_model(model, params)


def send(context, positions, tokens=(), rows=None, sequences=None, wants=None):
    """Sends a batch of tokens, or of an image's rows [n, width]. Returns the status of llama_decode.

    positions: one for each token, or four for M-RoPE. sequences: the sequence of each token (default: 0). wants:
    whether to compute the logits of each token (default: those of the last token).
    """
    n = len(tokens) if rows is None else len(rows)
    batch = llama.llama_batch_init(n, 0 if rows is None else rows.shape[1], 1)
    held = (llama.llama_pos * len(positions))(*map(int, positions))
    own = ctypes.cast(batch.pos, ctypes.c_void_p).value  # allocated for n positions, but M-RoPE needs 4 n
    batch.pos, batch.n_tokens = ctypes.cast(held, ctypes.POINTER(llama.llama_pos)), n
    for i in range(n):
        if rows is None:
            batch.token[i] = int(tokens[i])
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequences[i] if sequences else 0
        batch.logits[i] = wants[i] if wants else i == n - 1
    if rows is not None:
        given = np.ascontiguousarray(rows, np.float32)
        ctypes.memmove(batch.embd, given.ctypes.data, given.nbytes)
    status = llama.llama_decode(context, batch)
    batch.pos = ctypes.cast(own, ctypes.POINTER(llama.llama_pos))
    llama.llama_batch_free(batch)
    return status


def decode(context, *arguments, **options):
    """Sends a batch as `send` does. Raises SystemExit when llama_decode returns an error."""
    if status := send(context, *arguments, **options):
        raise SystemExit(f"llama_decode returned {status}")


def tokenize(vocab, text, beginning=False):
    """Returns the tokens of a text. beginning: whether to add the BOS token, if the model has one."""
    data = text.encode()
    out = (llama.llama_token * (len(data) + 8))()
    return list(out[: llama.llama_tokenize(vocab, data, len(data), out, len(out), beginning, True)])


def logits(context, at=-1):
    """Returns the logits [n_vocab] after token `at` of the last batch. Default: the last token."""
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(llama.llama_get_model(context)))
    return np.ctypeslib.as_array(llama.llama_get_logits_ith(context, at), (n_vocab,)).copy()

"""Batches of tokens or of image rows for llama.cpp: that of kvedge if pykvedge was imported before, else another."""

import ctypes

import llama_cpp.llama_cpp as llama
import numpy as np

SILENT = llama.llama_log_callback(lambda level, text, data: None)  # llama.cpp calls it as long as the process lives
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
    """A context of one thread. settings: of its parameters, such as EXACT."""
    params = llama.llama_context_default_params()
    for name, value in {"n_threads": 1, "n_threads_batch": 1, **settings}.items():
        setattr(params, name, value)
    return llama.llama_init_from_model(model, params)


def send(context, positions, tokens=(), rows=None, sequences=None, wants=None):
    """Sends a batch of tokens, or of an image's rows [n, width]; returns the status of llama_decode.

    positions: one each, or four of M-RoPE. sequences, wants: the sequence of each, and whether logits are asked for; by
    default all are of sequence 0, and the last one's logits are.
    """
    n = len(tokens) if rows is None else len(rows)
    batch = llama.llama_batch_init(n, 0 if rows is None else rows.shape[1], 1)
    held = (llama.llama_pos * len(positions))(*map(int, positions))
    own = ctypes.cast(batch.pos, ctypes.c_void_p).value  # holds n, and M-RoPE wants four of each
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
    """As `send`. Raises SystemExit where llama.cpp does not read the batch."""
    if status := send(context, *arguments, **options):
        raise SystemExit(f"llama_decode returned {status}")


def tokenize(vocab, text, beginning=False):
    """beginning: with the token that begins a text, where the model has one."""
    data = text.encode()
    out = (llama.llama_token * (len(data) + 8))()
    return list(out[: llama.llama_tokenize(vocab, data, len(data), out, len(out), beginning, True)])


def logits(context, at=-1):
    """The logits behind a token of the last batch; by default its last one."""
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(llama.llama_get_model(context)))
    return np.ctypeslib.as_array(llama.llama_get_logits_ith(context, at), (n_vocab,)).copy()

"""Reports the cost of one answer: tokens, memory and time, as JSON or as one line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from pykvedge.models.vision import ImagePiece, Piece
from pykvedge.runtime.logprobs import Token
from pykvedge.system import shown

MIB = 2**20


@dataclass
class Tokens:
    """Counts the tokens of one turn. `image`: the part of `prompt` that came from images.

    pruned: image tokens that the model did not read. reused: tokens read in an earlier conversation. images_reused:
    images whose embeddings were cached, so they were not encoded. If a model cuts an image into parts, each part
    counts.
    """

    prompt: int = 0
    image: int = 0
    generated: int = 0
    pruned: int = 0
    reused: int = 0
    images_reused: int = field(default=0, compare=False)  # does not change what was read

    def add(self, pieces: Iterable[Piece]) -> Tokens:
        """Adds pieces that a model reads. Images must be encoded."""
        for piece in pieces:
            self.prompt += piece.n_tokens
            if isinstance(piece, ImagePiece):
                self.image += piece.n_tokens
                self.pruned += piece.n_rows - piece.n_tokens
                self.images_reused += piece.reused
        return self


@dataclass
class DeviceWork:
    """What the last compression did on devices.

    compressed: the compression ran on the devices; if false, it ran on the host, and problem says why. fetched_bytes:
    copied from devices. sent_bytes: copied to devices. Steps: devices measure rows for the scorer, the host chooses
    rows, devices gather kept rows and merge evicted rows, and the host sends its results (upload_s).
    """

    compressed: bool = False
    problem: str = ""
    fetched_bytes: int = 0
    sent_bytes: int = 0
    operations: int = 0  # operations of the compute graphs
    measure_s: float = 0.0
    choose_s: float = 0.0
    gather_s: float = 0.0
    merge_s: float = 0.0
    upload_s: float = 0.0


@dataclass
class Kv:
    """Sizes of the keys and values of the whole conversation, at the beginning of the answer. compressed_tokens and
    kept_of_them count this turn only.

    full_bytes: size of all tokens so far, uncompressed and not quantised. kept_bytes: size of the kept rows, read once
    per token of the answer. peak_bytes: largest size so far. kept_per_layer: kept KV pairs per KV head, averaged over
    the heads of each stored layer. At the answer's end, peak_bytes and both sizes of whole rows are measured again,
    because rows move to a file during the answer.
    """

    full_bytes: int = 0
    kept_bytes: int = 0
    peak_bytes: int = 0
    kept_per_layer: list[float] = field(default_factory=list)
    compressed_tokens: int = 0  # tokens compressed in this turn: the prompt, and the answer before it
    kept_of_them: int = 0  # kept KV pairs per KV head of these tokens, averaged over heads and layers
    whole_bytes: int = 0  # whole rows behind the kept rows, with scores; 0: whole rows are not kept
    whole_file_bytes: int = 0  # the part of whole_bytes in a file, which the system may drop from memory
    device: DeviceWork | None = None  # None: this turn compressed no rows on devices


@dataclass
class Rss:
    """Resident set size of the process, as the operating system reports it.

    The peak covers a whole message: encoding its images, reading and compressing its prompt. None if the peak was not
    measured (Settings.measure_peak).
    """

    before_prefill_bytes: int = 0
    peak_bytes: int | None = None
    after_compress_bytes: int = 0


@dataclass
class Time:
    """Seconds of each step. decode_steps: tokens decoded in decode_s."""

    load_s: float = 0.0
    encode_s: float = 0.0
    prefill_s: float = 0.0
    replay_s: float = 0.0  # second pass over the prompt, if the method needs one
    compress_s: float = 0.0
    decode_s: float = 0.0
    decode_steps: int = 0

    @property
    def decode_tok_s(self) -> float:
        """Returns generated tokens per second, or 0 if nothing was decoded."""
        return self.decode_steps / self.decode_s if self.decode_s > 0 else 0.0


@dataclass
class Drafts:
    """Counts guesses at tokens of an answer, and the batches that verified them (runtime/drafting.py)."""

    drafted: int = 0  # all guesses
    accepted: int = 0  # guesses that became tokens of the answer
    verifications: int = 0  # batches that verified guesses
    exact: bool | None = None  # whether each token equals the full cache's token; None: exactness was not requested
    read_bytes: int | None = None  # bytes of keys and values that drafts and verifications of exact answers read

    def read(self, n_bytes: int) -> None:
        """Adds bytes of keys and values that an exact answer read."""
        if self.exact is not None:
            self.read_bytes = (self.read_bytes or 0) + n_bytes

    def add(self, drafted: int, accepted: int) -> None:
        """Adds the counts of one batch."""
        self.drafted, self.accepted, self.verifications = (
            self.drafted + drafted, self.accepted + accepted, self.verifications + 1
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON object of a report. tokens_per_verification counts one extra token per batch, no guess."""
        return {
            **{name: value for name, value in vars(self).items() if value is not None},
            "acceptance": round(self.accepted / self.drafted, 4) if self.drafted else None,
            "tokens_per_verification": round(1 + self.accepted / self.verifications, 2) if self.verifications else None,
        }


@dataclass
class Saved:
    """The session file of a conversation. error: why the file could not be written, or empty."""

    path: str
    loaded: bool  # whether the conversation began in an earlier run
    turns: int  # answers in the file
    file_bytes: int = 0
    error: str = ""


@dataclass(frozen=True)
class ModelFacts:
    """The model that answered. name: from the file's header, else the file name. quantisation: empty if unknown."""

    name: str
    file: str
    quantisation: str


@dataclass
class Stream:
    """State of a stream. positions: position of the next token. trained: length that the model was trained for.

    turned: how often positions were renumbered. why_counted: why positions cannot be renumbered, or empty.
    """

    bound: int  # KV pairs per layer and KV head after every compression
    tokens: int  # read and generated so far, of all turns
    compressions: int
    kv_bytes: int  # current size
    full_bytes: int  # size of all tokens without compression
    positions: int
    trained: int = 0
    turned: int = 0
    why_counted: str = ""

    def note(self) -> str:
        """Returns a warning if the positions exceed the trained length, else an empty string."""
        if not self.trained or self.positions <= self.trained:
            return ""
        why = f" ({self.why_counted})" if self.why_counted else ""
        return f"position {self.positions} exceeds the training length {self.trained}: answers may become wrong{why}"


@dataclass(repr=False)
class Report:
    """All measurements of one turn."""

    method: str
    budget: float | int
    text: str = ""
    finish: str = ""  # "end" (end token), "stop" (stop text), "length" (max_tokens), "context" (full) or "cancelled"
    model: ModelFacts | None = None
    tokens: Tokens = field(default_factory=Tokens)
    kv: Kv = field(default_factory=Kv)
    rss: Rss = field(default_factory=Rss)
    time: Time = field(default_factory=Time)
    session: Saved | None = None  # only where a session file is kept
    bounded: bool | None = None  # whether the prompt was compressed layer by layer; None: not requested
    not_bounded: str = ""  # why the prompt was not compressed layer by layer, if requested
    stream: Stream | None = None  # None: not a stream
    drafts: Drafts | None = None  # None: answers are not drafted
    demoted_images: int | None = None  # number of images that a server request leaves out; None: not requested
    logprobs: list[Token] | None = None  # for each generated token, if Sampling.logprobs is set
    notes: list[str] = field(default_factory=list)  # problems beside the answer, for example with a cache folder

    def __repr__(self) -> str:
        return f"<Report {self.method} {self.budget}: {self.text!r}, {self.finish or 'not finished'} | {self.line()}>"

    def _repr_html_(self) -> str:
        t, kv = self.time, self.kv
        rows = {
            "answer": self.text,
            "ended by": self.finish,
            "tokens": f"prompt {self.tokens.prompt}, of images {self.tokens.image}, answer {self.tokens.generated}",
            "KV pairs per head": f"{kv.kept_of_them} kept of {kv.compressed_tokens}",
            "KV MiB": f"{kv.kept_bytes / MIB:.2f} kept of {kv.full_bytes / MIB:.2f}, peak {kv.peak_bytes / MIB:.2f}",
            "seconds": f"images {t.encode_s:.3f}, prompt {t.prefill_s:.3f}, compression {t.compress_s:.3f}, "
            f"answer {t.decode_s:.3f} ({t.decode_tok_s:.1f} tokens/s)",
            **({"notes": "; ".join(self.notes)} if self.notes else {}),
        }
        return shown.table(f"{self.method} {self.budget}", rows)

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON object that `kvedge chat --json` prints: bytes, seconds, tokens per second."""
        t, kv = self.time, self.kv
        whole = ("whole_bytes", "whole_file_bytes") if kv.whole_bytes else ()
        figures = ("full_bytes", "kept_bytes", "peak_bytes", "kept_per_layer", *whole)
        where_asked = {
            "stream": self.stream and asdict(self.stream),
            "session": self.session and asdict(self.session),
            "bounded": None if self.bounded is None else {"used": self.bounded, "why_not": self.not_bounded},
            "drafts": self.drafts and self.drafts.as_json(),
            "logprobs": None if self.logprobs is None else [token.as_json() for token in self.logprobs],
            "notes": self.notes or None,
            "device": kv.device and asdict(kv.device),
        }
        return {
            "model": asdict(self.model) if self.model else None,
            "method": self.method,
            "budget": self.budget,
            "text": self.text,
            "stop": self.finish,
            "tokens": dict(vars(self.tokens)),
            "kv": {name: getattr(kv, name) for name in figures},
            "rss": dict(vars(self.rss)),
            "time": {
                **{name: round(value, 4) for name, value in vars(t).items() if name.endswith("_s")},
                "decode_tok_s": round(t.decode_tok_s, 2),
            },
            **{name: value for name, value in where_asked.items() if value is not None},
        }

    def line(self) -> str:
        """Returns the report as one line for a person."""
        tokens, kv, stream = self.tokens, self.kv, self.stream
        pruned = f" of {tokens.image + tokens.pruned}" if tokens.pruned else ""
        counts = [f"{tokens.image}{pruned} image"] if tokens.image else []
        counts += [f"{tokens.images_reused} from the cache"] if tokens.images_reused else []
        counts += [f"{tokens.reused} read before"] if tokens.reused else []
        image = f" ({', '.join(counts)})" if counts else ""
        least = kv.kept_bytes if stream is None else stream.kv_bytes
        # below half of a tenth the smaller number would be 0.0
        unit, size = ("MiB", MIB) if kv.full_bytes >= MIB / 10 and least >= MIB / 20 else ("KiB", 1024)
        speed = f"{self.time.decode_tok_s:.1f} tok/s" if self.time.decode_steps else ""
        if stream is not None:
            new = f"{tokens.prompt}{image} new -> {kv.kept_of_them} of {stream.bound}"
            held = f"KV {stream.kv_bytes / size:.1f} {unit}, peak {kv.peak_bytes / size:.1f}"
            parts = [f"stream of {stream.tokens} tokens, {new}", f"{held}, full {stream.full_bytes / size:.1f}"]
            return " | ".join(filter(None, [*parts, speed, stream.note()]))
        answer = kv.compressed_tokens - tokens.prompt
        since = f" + {answer} {'read before' if kv.whole_bytes else 'from the last answer'}" if answer > 0 else ""
        everything = kv.kept_of_them >= kv.compressed_tokens
        kept = ", all kept" if everything else f" -> {kv.kept_of_them} kept"
        after = "" if kv.kept_bytes == kv.full_bytes else f" -> {kv.kept_bytes / size:.1f}"
        parts = [f"prompt {tokens.prompt} tokens{image}{since}{kept}", f"KV {kv.full_bytes / size:.1f}{after} {unit}"]
        if kv.whole_bytes:
            in_file, rest = kv.whole_file_bytes / size, (kv.whole_bytes - kv.whole_file_bytes) / size
            file = [f"{in_file:.1f} {unit} in a file that the system may drop"] if kv.whole_file_bytes else []
            held = [f"{rest:.1f} {unit} in memory"] if rest >= 0.05 or not file else []
            parts.append(f"whole rows {' and '.join(file + held)}")
        again = f"read again in {self.time.replay_s:.1f} s" if self.time.replay_s else ""
        drafts = self.drafts
        right = f"{drafts.accepted} of {drafts.drafted} draft tokens accepted" if drafts and drafts.drafted else ""
        return " | ".join(filter(None, [*parts, again, right, speed]))

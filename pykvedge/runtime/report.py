"""A Report says what one answer cost: tokens, memory and time, as JSON and as one line."""

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
    """These tokens are counted in one turn; `image` is the part of `prompt` that came from images.

    pruned: tokens of images that the model did not read. reused: tokens that an earlier conversation had read.
    images_reused: images whose embeddings were there, so that they were not encoded; of models that cut an image into
    several, each of its parts counts.
    """

    prompt: int = 0
    image: int = 0
    generated: int = 0
    pruned: int = 0
    reused: int = 0
    images_reused: int = field(default=0, compare=False)  # which does not change what was read

    def add(self, pieces: Iterable[Piece]) -> Tokens:
        """Adds what a model reads, encoded."""
        for piece in pieces:
            self.prompt += piece.n_tokens
            if isinstance(piece, ImagePiece):
                self.image += piece.n_tokens
                self.pruned += piece.n_rows - piece.n_tokens
                self.images_reused += piece.reused
        return self


@dataclass
class DeviceWork:
    """The last compression did this with rows on devices.

    compressed: whether it took place where they lie; else on the host, and problem says why. fetched_bytes came from
    the devices, sent_bytes went there. Scorers' measures are taken there, the host chooses, kept rows are gathered and
    evicted ones merged there; upload_s: what the host computed was sent.
    """

    compressed: bool = False
    problem: str = ""
    fetched_bytes: int = 0
    sent_bytes: int = 0
    operations: int = 0  # of graphs
    measure_s: float = 0.0
    choose_s: float = 0.0
    gather_s: float = 0.0
    merge_s: float = 0.0
    upload_s: float = 0.0


@dataclass
class Kv:
    """These figures are of keys and values of the whole conversation when the answer begins, earlier turns included;
    compressed_tokens and kept_of_them are of this turn alone.

    full_bytes: what all tokens so far would take, had nothing been dropped or quantised. kept_bytes: what is left, and
    read once for every token of the answer. peak_bytes: the most that there was at once, up to now. When the answer has
    ended, peak_bytes and both figures of whole rows are told again: rows go to a file while it is generated.
    kept_per_layer: KV pairs per KV head that are left, averaged over the heads of each stored layer.
    """

    full_bytes: int = 0
    kept_bytes: int = 0
    peak_bytes: int = 0
    kept_per_layer: list[float] = field(default_factory=list)
    compressed_tokens: int = 0  # what this turn compressed: its prompt, and in later turns the answer before it
    kept_of_them: int = 0  # pairs per head that are left of those tokens, averaged over heads and layers
    whole_bytes: int = 0  # of whole rows behind the kept ones, where they stay, scores included
    whole_file_bytes: int = 0  # of these, in a file, whose pages the system may drop from memory
    device: DeviceWork | None = None  # only where rows lay on devices when this turn compressed them


@dataclass
class Rss:
    """The operating system tells this resident set size of the process.

    The peak is that of a whole message: its images are encoded, its prompt is read and compressed. It is None where
    nobody asked for it (Settings.measure_peak).
    """

    before_prefill_bytes: int = 0
    peak_bytes: int | None = None
    after_compress_bytes: int = 0


@dataclass
class Time:
    """Each step took so many seconds. decode_steps: tokens that were decoded in decode_s."""

    load_s: float = 0.0
    encode_s: float = 0.0
    prefill_s: float = 0.0
    replay_s: float = 0.0  # a second pass over the prompt, where the method goes by one
    compress_s: float = 0.0
    decode_s: float = 0.0
    decode_steps: int = 0

    @property
    def decode_tok_s(self) -> float:
        """So many tokens per second were generated; the figure is 0 when nothing was decoded."""
        return self.decode_steps / self.decode_s if self.decode_s > 0 else 0.0


@dataclass
class Drafts:
    """Guesses at the tokens of an answer were verified, several in a batch (runtime/drafting.py)."""

    drafted: int = 0  # guesses
    accepted: int = 0  # guesses that were the answer's tokens
    verifications: int = 0  # batches
    exact: bool | None = None  # whether each token is the whole cache's; None: that was not asked for
    read_bytes: int | None = None  # of keys and values, for drafts and verifications of exact answers

    def read(self, n_bytes: int) -> None:
        """Adds keys and values that an exact answer read."""
        if self.exact is not None:
            self.read_bytes = (self.read_bytes or 0) + n_bytes

    def add(self, drafted: int, accepted: int) -> None:
        """Adds a batch."""
        self.drafted, self.accepted, self.verifications = (
            self.drafted + drafted, self.accepted + accepted, self.verifications + 1
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """Makes the object of a report. tokens_per_verification: each batch has one token of its own."""
        return {
            **{name: value for name, value in vars(self).items() if value is not None},
            "acceptance": round(self.accepted / self.drafted, 4) if self.drafted else None,
            "tokens_per_verification": round(1 + self.accepted / self.verifications, 2) if self.verifications else None,
        }


@dataclass
class Saved:
    """A conversation was saved in this session file. error: why it could not be written, or empty."""

    path: str
    loaded: bool  # whether the conversation began in an earlier run
    turns: int  # answers in the file
    file_bytes: int = 0
    error: str = ""


@dataclass(frozen=True)
class ModelFacts:
    """This model answered. name: as its file says, or the file's; quantisation: empty where the file says none."""

    name: str
    file: str
    quantisation: str


@dataclass
class Stream:
    """A stream has become this. positions: of the next token; trained: as many as the model was trained for.

    turned: how often positions were made smaller. why_counted: why they cannot be, or empty.
    """

    bound: int  # KV pairs per layer and head that are left by every compression
    tokens: int  # read and generated so far, of all turns
    compressions: int
    kv_bytes: int  # now
    full_bytes: int  # what all of these tokens would take
    positions: int
    trained: int = 0
    turned: int = 0
    why_counted: str = ""

    def note(self) -> str:
        """Returns a warning where the positions go beyond the model's; else nothing."""
        if not self.trained or self.positions <= self.trained:
            return ""
        why = f" ({self.why_counted})" if self.why_counted else ""
        return f"positions up to {self.positions}, trained for {self.trained}: answers may lose sense{why}"


@dataclass(repr=False)
class Report:
    """A report holds everything that was measured about one turn."""

    method: str
    budget: float | int
    text: str = ""
    finish: str = ""  # "end" (the model's), "stop" (a text), "length" (max_tokens), "context" (full) or "cancelled"
    model: ModelFacts | None = None
    tokens: Tokens = field(default_factory=Tokens)
    kv: Kv = field(default_factory=Kv)
    rss: Rss = field(default_factory=Rss)
    time: Time = field(default_factory=Time)
    session: Saved | None = None  # only where a session file is kept
    bounded: bool | None = None  # whether the prompt was compressed layer by layer; None: that was not asked for
    not_bounded: str = ""  # why not, where it was asked for
    stream: Stream | None = None  # only of a stream
    drafts: Drafts | None = None  # only where answers are drafted
    demoted_images: int | None = None  # all that a request leaves out (serve); None: that was not asked for
    logprobs: list[Token] | None = None  # of each generated token, where Sampling.logprobs asks for them
    notes: list[str] = field(default_factory=list)  # what went wrong beside the answer, as with a cache folder

    def __repr__(self) -> str:
        return f"<Report {self.method} {self.budget}: {self.text!r}, {self.finish or 'not at its end'} | {self.line()}>"

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
        """Makes the object that `kvedge chat --json` prints, in bytes, seconds and tokens per second."""
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
        """Sums the report up in one line for a person."""
        tokens, kv, stream = self.tokens, self.kv, self.stream
        pruned = f" of {tokens.image + tokens.pruned}" if tokens.pruned else ""
        counts = [f"{tokens.image}{pruned} image"] if tokens.image else []
        counts += [f"{tokens.images_reused} from the cache"] if tokens.images_reused else []
        counts += [f"{tokens.reused} read before"] if tokens.reused else []
        image = f" ({', '.join(counts)})" if counts else ""
        unit, size = ("MiB", MIB) if kv.full_bytes >= MIB / 10 else ("KiB", 1024)
        speed = f"{self.time.decode_tok_s:.1f} tok/s" if self.time.decode_steps else ""
        if stream is not None:
            new = f"{tokens.prompt}{image} new -> {kv.kept_of_them} of {stream.bound}"
            held = f"KV {stream.kv_bytes / size:.1f} {unit}, peak {kv.peak_bytes / size:.1f}"
            parts = [f"stream of {stream.tokens} tokens, {new}", f"{held}, full {stream.full_bytes / size:.1f}"]
            return " | ".join(filter(None, [*parts, speed, stream.note()]))
        answer = kv.compressed_tokens - tokens.prompt
        since = f" + {answer} {'read before' if kv.whole_bytes else 'of the last answer'}" if answer > 0 else ""
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
        right = f"{drafts.accepted} of {drafts.drafted} drafted right" if drafts and drafts.drafted else ""
        return " | ".join(filter(None, [*parts, again, right, speed]))

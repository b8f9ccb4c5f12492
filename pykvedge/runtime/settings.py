"""Settings say how a session runs, apart from what it keeps (that is the plan)."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from pykvedge.caches.encoded import IMAGE_CACHE
from pykvedge.errors import KvedgeWarning, UsageError, check_number, unknown
from pykvedge.models.imagetokens import MOST_TOKENS
from pykvedge.models.offload import Offload
from pykvedge.reference.kvtypes import KvType

if TYPE_CHECKING:
    from pykvedge.plans.profile import Given

MAX_THREADS = 512  # of ggml
MAX_CTX = 2**30
STREAM_TOKENS = 128
LEAST_POSITIONS = 256
CACHE_SIZE = 4 << 30  # bytes of a cache folder
KEEP_PLACES, KEEP_TYPES, KEEP_SPACE = ("ram", "disk"), ("f16", "q8_0"), 20 << 30  # whole rows: where, how, and bytes


@dataclass(frozen=True)
class Keep:
    """Where whole rows stay behind compressed ones: a later message is read over them, and nothing is lost.

    folder: of the file, on a local drive; empty: the cache folder. space: bytes at most. type: "f16", as they are, or
    "q8_0", half as large and rounded.
    """

    place: str
    folder: str | bytes | os.PathLike[str] = ""
    space: int = KEEP_SPACE
    type: str = "f16"

    def __post_init__(self) -> None:
        if self.place not in KEEP_PLACES:
            raise UsageError(f"keep must be 'ram' or 'disk', not {self.place!r:.40}")
        if not isinstance(self.space, int) or self.space < 1:
            raise UsageError(f"keep_space must be a number of bytes, not {self.space!r:.40}")
        if not isinstance(self.folder, (str, bytes, os.PathLike)) or b"\0" in os.fsencode(self.folder):
            raise UsageError(f"keep_folder must be the path of a folder, not {self.folder!r:.40}")
        if self.type not in KEEP_TYPES:
            raise UsageError(f"keep_type must be 'f16' or 'q8_0', not {self.type!r:.40}")

    @classmethod
    def of(
        cls,
        keep: str = "",
        keep_folder: str | os.PathLike[str] = "",
        keep_space: int = KEEP_SPACE,
        keep_type: str = "f16",
    ) -> Keep | None:
        """Makes it of settings; None: whole rows stay nowhere. Raises UsageError."""
        return cls(keep, keep_folder, keep_space, keep_type) if keep else None

    def made_folder(self) -> str:
        """Returns the folder of the file; makes the default one, which is the owner's alone. Raises UsageError."""
        if self.place != "disk" or self.folder:
            return os.fsdecode(self.folder)
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvedge" / "keep"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            why = f"cannot make the folder {folder}: {error.strerror}; name one with --keep-folder"
            raise UsageError(why) from None
        return str(folder)


class LoadSettings(TypedDict, total=False):
    """These are the fields of Settings that belong to the loading of a model, for those who name them one by one."""

    threads: int
    gpu_layers: int | str | None
    device: str
    rpc: str
    verbose: bool
    prompt_cache: int
    image_cache: int
    cache: str | os.PathLike[str] | None
    cache_size: int
    image_min_tokens: int
    image_max_tokens: int


class GivenSettings(LoadSettings, total=False):
    """All fields of Settings."""

    n_ctx: int
    kv_type: str
    kv_rotate: str
    system: str
    measure_peak: bool
    bounded: bool
    profile: Given
    stream: bool | int
    positions: str | int
    undo: bool
    question_blind: bool
    keep: str
    keep_folder: str | os.PathLike[str]
    keep_space: int
    keep_type: str
    age: float
    lookup: bool
    exact: bool


@dataclass(frozen=True)
class Settings:
    """What is 0 or None is chosen for the machine and the model. Raises UsageError for values out of range."""

    n_ctx: int = 0  # tokens that the conversation may hold
    threads: int = 0
    gpu_layers: int | str | None = None  # layers on devices, -1 for all, "auto" for as many as fit
    device: str = "auto"  # devices that layers may lie on: "auto" for all, "none", or names, as in "CUDA0,RPC0"
    rpc: str = ""  # RPC servers whose devices are added, as in "HOST:PORT,HOST:PORT"
    kv_type: str = "f16"  # storage type of keys and values (kvtypes.NAMES), or "K:V" for one of each
    kv_rotate: str = "auto"  # q8_0, q4_0, tq3 round rotated rows: "auto" as llama.cpp's own cache does, "on" or "off"
    system: str = ""  # text that opens the conversation
    verbose: bool = False  # llama.cpp's log on stderr
    measure_peak: bool = False  # note the peak of resident memory of every message, which takes a thread
    bounded: bool = False  # compress each layer of a prompt before the next one runs, where that is possible
    profile: Given = None  # one or several, for plans that need them (profile.py)
    # the conversation is a stream (stream.py): compressed to the plan's bound after every image and every 128 tokens
    # (True), or whenever so many have come
    stream: bool | int = False
    # beyond the length that the model was trained for: "turn" makes them smaller and turns the keys (sequence.py),
    # "count" lets them go on; a number: "turn", as if the model was trained for so many
    positions: str | int = "turn"
    image_cache: int = IMAGE_CACHE  # bytes in memory of images that were encoded, for all sessions of a loaded model
    cache: str | os.PathLike[str] | None = None  # folder in which they outlive the program, and others find them
    cache_size: int = CACHE_SIZE  # bytes that all in it may take
    # of an image, before it is encoded, where the encoder takes images of any size; 0 leaves its own limits
    image_min_tokens: int = 0
    image_max_tokens: int = 0
    undo: bool = False  # a copy of the cache is kept from before the last message, for Session.undo and retry
    # what comes before a question, up to the last image, is compressed without it: other questions find it as it was
    question_blind: bool = False
    # whole rows stay behind the compressed ones, in "ram" or on "disk": a later message is read over all of them
    keep: str = ""
    keep_folder: str | os.PathLike[str] = ""  # where the file lies; empty: the cache folder
    keep_space: int = KEEP_SPACE  # bytes of whole rows at most
    keep_type: str = "f16"  # "q8_0": whole rows are half as large, and rounded; not with `exact`
    # answers are drafted with what the conversation said before, and verified in batches: sooner where they repeat it
    lookup: bool = False
    age: float = 0.0  # with each message that does not ask about it an image keeps this share of its pairs; 0: all
    # answers are drafted with the compressed rows and verified over the whole ones of `keep`: they are those of "full"
    exact: bool = False
    prompt_cache: int = 0  # bytes in memory for what conversations begin with, so that others go on from it

    def __post_init__(self) -> None:
        check_number("n_ctx", self.n_ctx)
        check_number("threads", self.threads)
        check_number("prompt_cache", self.prompt_cache)
        if self.prompt_cache < 0:
            raise UsageError(f"prompt_cache must be a number of bytes, 0 for none, not {self.prompt_cache}")
        if self.gpu_layers is not None and not isinstance(self.gpu_layers, str):
            check_number("gpu_layers", self.gpu_layers)
            if not -1 <= self.gpu_layers < 2**31:
                raise UsageError(f"gpu_layers must be 0 or more, or -1 for all, not {self.gpu_layers}")
        for name in ("verbose", "measure_peak", "bounded", "undo", "question_blind", "lookup", "exact"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be True or False, not {getattr(self, name)!r:.40}")
        for name in ("device", "rpc", "system"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"{name} must be text, not {getattr(self, name)!r:.40}")
        object.__setattr__(self, "kv_type", str(KvType.parse(self.kv_type, self.kv_rotate)))
        if not 0 <= self.n_ctx < MAX_CTX:
            raise UsageError(f"n_ctx must be a number of tokens, or 0 (automatic), not {self.n_ctx}")
        if not 0 <= self.threads <= MAX_THREADS:
            raise UsageError(f"threads must lie between 1 and {MAX_THREADS}, or be 0 (automatic), not {self.threads}")
        if self.threads > (there := os.cpu_count() or self.threads):
            warnings.warn(f"{self.threads} threads wait for each other on {there} processors; 0 threads are as many "
                          "as answer soonest", KvedgeWarning, stacklevel=3)  # fmt: skip
        _ = self.offload  # checks device and rpc
        self._check_caches()
        self._check_image_limits()
        self._check_stream()
        self._check_keep()

    def _check_stream(self) -> None:
        named = isinstance(self.positions, str) and self.positions in ("turn", "count")
        if not named and not (type(self.positions) is int and LEAST_POSITIONS <= self.positions < MAX_CTX):
            raise UsageError(
                f"positions must be turn, count or a number of at least {LEAST_POSITIONS}, not {self.positions!r:.40}"
            )
        if not isinstance(self.stream, int) or not 0 <= self.stream < MAX_CTX:
            raise UsageError(f"stream must be True, or a number of tokens of at least 1, not {self.stream!r}")
        if self.stream and self.bounded:
            raise UsageError("a stream is read piece by piece, a bounded prompt at once: choose one of the two")
        if self.stream and self.question_blind:
            raise UsageError("a stream is compressed before its question in any case: leave question_blind out")
        if self.stream and self.undo:
            raise UsageError("a stream forgets what it has read, so nothing of it can be undone: choose one of the two")
        if self.stream and self.drafts:
            raise UsageError("a stream forgets what it has read, so no draft can be taken back: choose one of the two")
        if self.stream and KvType.parse(self.kv_type).quantised:
            raise UsageError(
                f"a stream is compressed again and again, and {self.kv_type} would round it each time; use f16 or bf16"
            )

    def _check_keep(self) -> None:
        if isinstance(self.age, bool) or not isinstance(self.age, (int, float)) or not 0 <= self.age < 1:
            raise UsageError(f"age must be a share below 1, such as 0.5, or 0 for none, not {self.age!r:.40}")
        if self.keep_folder and self.keep != "disk":
            raise UsageError("keep_folder is where whole rows lie in a file: set keep to 'disk', or leave it out")
        if self.keeping is None:
            if self.age:
                raise UsageError("images that age come back from whole rows: set keep to 'ram' or 'disk'")
            if self.exact:
                raise UsageError("exact answers are verified over whole rows: set keep to 'ram' or 'disk'")
            if self.keep_space != KEEP_SPACE:
                raise UsageError("keep_space bounds whole rows: set keep to 'ram' or 'disk', or leave it out")
            if self.keep_type != "f16":
                raise UsageError("keep_type is how whole rows are stored: set keep to 'ram' or 'disk', or leave it out")
            return
        if self.exact and self.keep_type != "f16":
            raise UsageError("exact answers are verified over whole rows as they are: leave exact or keep_type out")
        if self.stream or self.bounded:
            raise UsageError("a stream and a bounded prompt drop rows for good, so keep does not go with them")
        if self.question_blind:
            raise UsageError("with whole rows each question chooses for itself: leave keep or question_blind out")
        if isinstance(self.positions, int):
            raise UsageError("with whole rows positions go on counting: leave keep or the number of positions out")

    def _check_caches(self) -> None:
        for name, least in (("image_cache", 0), ("cache_size", 1)):
            check_number(name, getattr(self, name))
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be {least} bytes or more, not {getattr(self, name)}")
        if self.cache is None:
            return
        if not isinstance(self.cache, (str, os.PathLike)) or not isinstance(name := os.fspath(self.cache), str):
            raise UsageError(f"cache must be the path of a folder, not {self.cache!r:.40}")
        if "\0" in name or not name:
            raise UsageError("the path of the cache folder is empty or holds a zero byte")

    def _check_image_limits(self) -> None:
        for name in ("image_min_tokens", "image_max_tokens"):
            check_number(name, getattr(self, name))
            if not 0 <= getattr(self, name) <= MOST_TOKENS:
                raise UsageError(f"{name} must lie between 1 and {MOST_TOKENS}, not {getattr(self, name)}")
        if 0 < self.image_max_tokens < self.image_min_tokens:
            raise UsageError(
                f"image_min_tokens is {self.image_min_tokens}, more than image_max_tokens, {self.image_max_tokens}"
            )

    @property
    def drafts(self) -> bool:
        """Tells whether answers are drafted."""
        return self.lookup or self.exact

    @property
    def storage(self) -> KvType:
        """How keys and values are stored: kv_type and kv_rotate."""
        return KvType.parse(self.kv_type, self.kv_rotate)

    @property
    def keeping(self) -> Keep | None:
        """Where whole rows stay; None: nowhere. Raises UsageError."""
        return Keep.of(self.keep, self.keep_folder, self.keep_space, self.keep_type)

    @property
    def image_limits(self) -> tuple[int, int]:
        """The least and the most tokens of an image; 0 where the encoder's own are to hold."""
        return self.image_min_tokens, self.image_max_tokens

    @property
    def changed_loading(self) -> list[str]:
        """Names the settings of a loading, other than threads, that are not what they are by themselves."""
        others = [f for f in fields(self) if f.name in LoadSettings.__annotations__ and f.name != "threads"]
        return [f.name for f in others if getattr(self, f.name) != f.default]

    @property
    def stream_tokens(self) -> int:
        """A stream is compressed after so many tokens; what is none has 0."""
        return STREAM_TOKENS if self.stream is True else int(self.stream)

    def most_positions(self, trained: int) -> int:
        """Returns the length within which positions stay; trained: the model's, 0: not known."""
        return self.positions if isinstance(self.positions, int) else trained

    @classmethod
    def of(cls, given: dict[str, Any]) -> Settings:
        """Makes settings of names and values. Raises UnknownNameError for a name that is no setting."""
        names = [f.name for f in fields(cls)]
        for name in given:
            if name not in names:
                raise unknown("session setting", name, names)
        return cls(**given)

    @property
    def offload(self) -> Offload:
        """Which devices the model's layers lie on."""
        if not isinstance(self.gpu_layers, str):
            return Offload(self.gpu_layers, self.device, self.rpc)
        from pykvedge.models.placement import Talk
        from pykvedge.runtime.llama_context import DEFAULT_CTX, N_UBATCH

        tokens = self.n_ctx or DEFAULT_CTX
        kv_type = None if self.bounded or self.stream else KvType.parse(self.kv_type)
        return Offload(self.gpu_layers, self.device, self.rpc, Talk(tokens, tokens, kv_type, N_UBATCH))

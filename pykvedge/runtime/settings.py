"""Settings of a session: how it runs. The plan says what it keeps."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from pykvedge.caches.encoded import IMAGE_CACHE
from pykvedge.errors import KvedgeWarning, UsageError, check_number, unknown
from pykvedge.models.imagetokens import MAX_TOKENS
from pykvedge.models.offload import Offload
from pykvedge.reference.kvtypes import KEEP_TYPES, KvType

if TYPE_CHECKING:
    from pykvedge.plans.profile import Given

MAX_THREADS = 512  # limit of ggml
MAX_CTX = 2**30
STREAM_TOKENS = 128
LEAST_POSITIONS = 256
CACHE_SIZE = 4 << 30  # bytes of a cache folder
KEEP_PLACES, KEEP_SPACE = ("ram", "disk"), 20 << 30  # whole rows: where they are stored, and bytes


@dataclass(frozen=True)
class Keep:
    """Where whole rows stay behind compressed rows. A later message is read over whole rows, so nothing is lost.

    folder: for the file, on a local drive; empty: the cache folder. space: limit in bytes. type: "f16": as computed;
    "q8_0": half the size, rounded.
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
            raise UsageError(f"keep_type must be {' or '.join(map(repr, KEEP_TYPES))}, not {self.type!r:.40}")

    @classmethod
    def of(
        cls,
        keep: str = "",
        keep_folder: str | os.PathLike[str] = "",
        keep_space: int = KEEP_SPACE,
        keep_type: str = "f16",
    ) -> Keep | None:
        """Returns the Keep of these settings, or None if whole rows are not kept. Raises UsageError."""
        return cls(keep, keep_folder, keep_space, keep_type) if keep else None

    def made_folder(self) -> str:
        """Returns the folder of the file. Makes the default folder, readable by its owner only. Raises UsageError."""
        if self.place != "disk" or self.folder:
            return os.fsdecode(self.folder)
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvedge" / "keep"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            why = f"the folder {folder} cannot be created: {error.strerror}; name another folder with --keep-folder"
            raise UsageError(why) from None
        return str(folder)


class LoadSettings(TypedDict, total=False):
    """Fields of Settings for loading a model, as keyword arguments."""

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
    """All fields of Settings, as keyword arguments."""

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
    """Settings of a session. 0 or None: chosen for the machine and the model. Raises UsageError for invalid values."""

    n_ctx: int = 0  # tokens that the conversation may hold
    threads: int = 0
    gpu_layers: int | str | None = None  # layers on devices; -1: all; "auto": as many as fit
    device: str = "auto"  # devices for layers: "auto" for all, "none", or names, as in "CUDA0,RPC0"
    rpc: str = ""  # RPC servers with more devices, as in "HOST:PORT,HOST:PORT"
    kv_type: str = "f16"  # storage type of keys and values (kvtypes.NAMES), or "K:V" for two types
    kv_rotate: str = "auto"  # q8_0, q4_0, tq3 round rotated rows: "on", "off", or "auto": as llama.cpp's cache does
    system: str = ""  # text that opens the conversation
    verbose: bool = False  # llama.cpp's log on stderr
    measure_peak: bool = False  # measure each message's peak of resident memory, which takes a thread
    bounded: bool = False  # compress each layer of a prompt before the next layer runs, if possible
    profile: Given = None  # one or several profiles, for plans that need profiles (profile.py)
    # the conversation is a stream (stream.py), compressed to the plan's limit: True: after every image and every 128
    # tokens; a number: after so many tokens
    stream: bool | int = False
    # positions beyond the model's trained length: "turn": renumber positions and rotate keys (sequence.py); "count": go
    # on counting; a number: "turn", with this number as the trained length
    positions: str | int = "turn"
    image_cache: int = IMAGE_CACHE  # bytes in memory for encoded images, shared by all sessions of a loaded model
    cache: str | os.PathLike[str] | None = None  # folder that keeps encoded images and openings for later runs
    cache_size: int = CACHE_SIZE  # limit of the folder in bytes
    # tokens per image, if the encoder takes images of any size; 0: the encoder's limits
    image_min_tokens: int = 0
    image_max_tokens: int = 0
    undo: bool = False  # keep a copy of the cache from before the last message, for Session.undo and retry
    # compress everything up to the last image without the question, so that other questions can reuse the result
    question_blind: bool = False
    # keep whole rows behind the compressed rows, in "ram" or on "disk": a later message is read over all whole rows
    keep: str = ""
    keep_folder: str | os.PathLike[str] = ""  # folder of the file; empty: the cache folder
    keep_space: int = KEEP_SPACE  # limit of whole rows in bytes
    keep_type: str = "f16"  # "q8_0": whole rows have half the size, and are rounded; not with `exact`
    # draft answers from earlier text of the conversation, and verify drafts in batches: faster if answers repeat text
    lookup: bool = False
    age: float = 0.0  # share of its KV pairs that an image keeps after a message about other things; 0: all
    # draft answers over compressed rows, and verify them over the whole rows of `keep`: answers equal method "full"
    exact: bool = False
    prompt_cache: int = 0  # bytes in memory for beginnings of conversations, which later conversations reuse

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
            warnings.warn(f"{self.threads} threads are more than {there} processors, which makes answers slow; set "
            f"threads to 0 "
                          "to choose the number automatically", KvedgeWarning, stacklevel=3)  # fmt: skip
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
            raise UsageError("stream and bounded exclude each other; omit one")
        if self.stream and self.question_blind:
            raise UsageError(
                "question_blind has no meaning with stream, which always compresses before the "
                "question; omit question_blind"
            )
        if self.stream and self.undo:
            raise UsageError("stream and undo exclude each other, because a stream drops KV pairs for good; omit one")
        if self.stream and self.drafts:
            raise UsageError("stream excludes lookup and exact, because a stream cannot remove draft tokens; omit one")
        if self.stream and KvType.parse(self.kv_type).quantised:
            raise UsageError(
                f"stream does not work with kv_type {self.kv_type}, which would round rows at every compression; use "
                f"f16 or bf16"
            )

    def _check_keep(self) -> None:
        if isinstance(self.age, bool) or not isinstance(self.age, (int, float)) or not 0 <= self.age < 1:
            raise UsageError(f"age must be a share below 1, such as 0.5, or 0 for none, not {self.age!r:.40}")
        if self.keep_folder and self.keep != "disk":
            raise UsageError("keep_folder needs keep='disk': set keep to 'disk', or omit keep_folder")
        if self.keeping is None:
            if self.age:
                raise UsageError("age needs the uncompressed KV rows: set keep to 'ram' or 'disk', or omit age")
            if self.exact:
                raise UsageError("exact needs the uncompressed KV rows: set keep to 'ram' or 'disk', or omit exact")
            if self.keep_space != KEEP_SPACE:
                raise UsageError("keep_space needs keep: set keep to 'ram' or 'disk', or omit keep_space")
            if self.keep_type != "f16":
                raise UsageError("keep_type needs keep: set keep to 'ram' or 'disk', or omit keep_type")
            return
        if self.exact and self.keep_type != "f16":
            raise UsageError(
                f"exact does not work with keep_type {self.keep_type}, which rounds rows; omit exact or keep_type"
            )
        if self.stream or self.bounded:
            raise UsageError("keep excludes stream and bounded, which drop KV rows for good; omit one")
        if self.question_blind:
            raise UsageError(
                "keep and question_blind exclude each other, because keep chooses KV pairs anew for "
                "each question; omit one"
            )
        if isinstance(self.positions, int):
            raise UsageError("keep does not work with a number for positions; omit keep or positions")

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
            raise UsageError("the path of the cache folder is empty or contains a zero byte")

    def _check_image_limits(self) -> None:
        for name in ("image_min_tokens", "image_max_tokens"):
            check_number(name, getattr(self, name))
            if not 0 <= getattr(self, name) <= MAX_TOKENS:
                raise UsageError(f"{name} must lie between 1 and {MAX_TOKENS}, not {getattr(self, name)}")
        if 0 < self.image_max_tokens < self.image_min_tokens:
            raise UsageError(
                f"image_min_tokens is {self.image_min_tokens}, more than image_max_tokens, {self.image_max_tokens}"
            )

    @property
    def drafts(self) -> bool:
        """Returns whether answers are drafted."""
        return self.lookup or self.exact

    @property
    def storage(self) -> KvType:
        """Returns how keys and values are stored: kv_type and kv_rotate."""
        return KvType.parse(self.kv_type, self.kv_rotate)

    @property
    def keeping(self) -> Keep | None:
        """Returns where whole rows stay, or None if they are not kept. Raises UsageError."""
        return Keep.of(self.keep, self.keep_folder, self.keep_space, self.keep_type)

    @property
    def image_limits(self) -> tuple[int, int]:
        """Returns the lowest and highest number of tokens per image. 0: the encoder's limit."""
        return self.image_min_tokens, self.image_max_tokens

    @property
    def changed_loading(self) -> list[str]:
        """Returns the names of load settings, except threads, that differ from their defaults."""
        others = [f for f in fields(self) if f.name in LoadSettings.__annotations__ and f.name != "threads"]
        return [f.name for f in others if getattr(self, f.name) != f.default]

    @property
    def stream_tokens(self) -> int:
        """Returns the tokens between two compressions of a stream, or 0 if the session is no stream."""
        return STREAM_TOKENS if self.stream is True else int(self.stream)

    def most_positions(self, trained: int) -> int:
        """Returns the length that positions must not exceed. trained: the model's trained length; 0: unknown."""
        return self.positions if isinstance(self.positions, int) else trained

    @classmethod
    def of(cls, given: dict[str, Any]) -> Settings:
        """Makes settings from a dict. Raises UnknownNameError for an unknown name, UsageError for an invalid value."""
        names = [f.name for f in fields(cls)]
        for name in given:
            if name not in names:
                raise unknown("session setting", name, names)
        return cls(**given)

    @property
    def offload(self) -> Offload:
        """Returns the devices of the model's layers. Raises UsageError."""
        if not isinstance(self.gpu_layers, str):
            return Offload(self.gpu_layers, self.device, self.rpc)
        from pykvedge.models.placement import ConversationSize
        from pykvedge.runtime.llama_context import DEFAULT_CTX, N_UBATCH

        tokens = self.n_ctx or DEFAULT_CTX
        kv_type = None if self.bounded or self.stream else KvType.parse(self.kv_type)
        return Offload(self.gpu_layers, self.device, self.rpc, ConversationSize(tokens, tokens, kv_type, N_UBATCH))

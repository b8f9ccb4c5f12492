"""What the tests of models by name share: a hub with tiny models, and an environment where no other hub is known."""

from dataclasses import dataclass
from pathlib import Path

from hubserver import HubServer

import pykvedge
from pykvedge.models.hub import fetching

REPO = "tiny/llava-GGUF"
MODEL, MMPROJ = "llava-Q4_K_M.gguf", "mmproj-llava-f16.gguf"
HEADERS = 2 * (128 << 10)  # bytes that are fetched first from a model and its encoder
_OTHERS = ("LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "MODEL_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE",
           "TRANSFORMERS_OFFLINE", "LLAMA_ARG_OFFLINE")  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A hub, and the cache folder of the clients."""

    hub: HubServer
    home: Path
    env: dict[str, str]

    @property
    def folder(self) -> Path:
        return self.home / "hub" / f"models--{REPO.replace('/', '--')}"

    def blobs(self) -> set[str]:
        """Returns the names of the files in the cache, including unfinished files."""
        return {path.name for path in (self.folder / "blobs").glob("*")}

    def asked(self) -> list[tuple[str, str, str | None]]:
        """Returns the requests since the last call: (method, path, range)."""
        out = [one for one in self.hub.requests if "agent" not in one[1]]  # huggingface_hub's request for itself
        self.hub.requests.clear()
        return out


def environment(hub: HubServer, home: Path) -> dict[str, str]:
    return {
        "HF_HOME": str(home),
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        **dict.fromkeys(_OTHERS, ""),
    }


def fill(hub: HubServer, pair) -> None:
    """Fills the repository that most tests use."""
    hub.add(REPO, "README.md", b"A tiny model.", large=False)
    hub.add(REPO, MODEL, pair.model.read_bytes())
    hub.add(REPO, MMPROJ, pair.mmproj.read_bytes())


def fresh_place(hub: HubServer, pair, home: Path, monkeypatch) -> Place:
    """Returns a hub without faults that holds the pair, and an empty cache. Sets this process's environment."""
    hub.forget()
    fill(hub, pair)
    env = environment(hub, home)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fetching, "_PAUSE_S", 0.01)
    return Place(hub, home, env)


def resolve(name: str = REPO, **settings):
    return pykvedge.hub.resolve(name, **settings)


def in_parts(model, folder):
    """Writes the model as several files, named as by llama.cpp's gguf-split. Returns the files."""
    rewritten(model, folder / "parted-Q8_0.gguf", split_max_tensors=8)
    return sorted(folder.glob("parted-*"))


def rewritten(model, out, widened=False, **settings):
    """Writes the same model to another file. widened: f32 weights. settings: of gguf's writer."""
    import gguf

    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents(), **settings)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], of)
    for tensor in reader.tensors:
        if widened:
            writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out

"""Checks model files before llama.cpp opens them. llama.cpp would abort, or name its own source in the error."""

from __future__ import annotations

import os

from gguf import LlamaFileType

from pykvedge.errors import ModelError
from pykvedge.models.gguf import Header, read_header
from pykvedge.models.mmproj_tensors import check_tensors
from pykvedge.models.mmproj_values import projector, read_tower
from pykvedge.models.model_values import check_values

# projector -> (tensor, dimension counted from the fastest) with the width of its output
_OUTPUT_WIDTH = {
    "mlp": ("mm.2.weight", 1),
    "ldpv2": ("mm.model.peg.0.bias", 0),
    "qwen2vl_merger": ("mm.2.bias", 0),
    "qwen2.5vl_merger": ("mm.2.bias", 0),
    "internvl": ("mm.model.mlp.3.weight", 1),
    "idefics3": ("mm.model.fc.weight", 1),
    "gemma3": ("mm.input_projection.weight", 0),
}
# projectors whose images need positions in two dimensions, and projectors whose images cannot have them
_NEEDS_M_ROPE = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger")
_NEEDS_PLAIN_ROPE = ("mlp", "ldp", "ldpv2", "gemma3", "idefics3", "internvl")


def facts(header: Header) -> tuple[str, str, str]:
    """Returns the name (of the model, else of its file), file name, and quantisation ("" if unknown)."""
    name = str(header.values.get("general.name") or header.path.stem)
    number = header.values.get("general.file_type")
    kind = next((kind.name for kind in LlamaFileType if kind == number), "")
    return name, header.path.name, kind.removeprefix("MOSTLY_").removeprefix("ALL_")


def check_model(given: Header | str | os.PathLike[str]) -> Header:
    """Returns the header of a language model. Raises ModelError if the file is no usable language model."""
    header = given if isinstance(given, Header) else read_header(given)
    path = header.path
    if header.architecture == "clip":
        raise ModelError(f"{path} is an image encoder; pass this file as --mmproj, and the language model as --model")
    if header.values.get("split.no"):
        raise ModelError(f"{path} is not the first file of its model; give the file with -00001-of- in its name")
    if not header.architecture:
        raise ModelError(f"{path} does not name its architecture; convert the model again")
    if not header.tensors:
        raise ModelError(f"{path} has no weights (perhaps only a vocabulary); use a complete model")
    check_values(header)
    return header


def check_mmproj(given: Header | str | os.PathLike[str], model: Header) -> Header:
    """Returns the header of an mmproj. Raises ModelError if the file is no mmproj or does not fit the model."""
    header = given if isinstance(given, Header) else read_header(given)
    path = header.path
    if header.architecture != "clip":
        kind = header.architecture or "unknown"
        raise ModelError(f"{path} is a '{kind}' model, not an image encoder (mmproj); check --model and --mmproj")
    if not header.values.get("clip.has_vision_encoder"):
        raise ModelError(f"{path} has no image encoder; use the mmproj that was made for this model's images")
    tower = read_tower(header)
    width, expected = _output_width(header), _embedding_width(model)
    if width and expected and width != expected:
        raise ModelError(
            f"{path} makes embeddings of width {width}, but the model {model.path} needs {expected}; "
            "use the mmproj that belongs to this model"
        )
    kind, m_rope = projector(header), f"{model.architecture}.rope.dimension_sections" in model.arrays
    if (kind in _NEEDS_M_ROPE and not m_rope) or (kind in _NEEDS_PLAIN_ROPE and m_rope):
        raise ModelError(
            f"{path} (projector '{kind}') was not made for a '{model.architecture}' model; "
            "use the mmproj that belongs to this model"
        )
    check_tensors(header, tower)
    return header


def _output_width(header: Header) -> int | None:
    name, dim = _OUTPUT_WIDTH.get(projector(header), ("", 0))
    tensor = header.tensors.get(name)
    return tensor.shape[dim] if tensor and dim < len(tensor.shape) else None


def _embedding_width(model: Header) -> int | None:
    width = model.values.get(f"{model.architecture}.embedding_length")
    deepstack = model.values.get(f"{model.architecture}.n_deepstack_layers", 0)
    return width * (1 + deepstack) if isinstance(width, int) and isinstance(deepstack, int) else None

"""The options of sampling and of the end of an answer, for the command line and for /set."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pykvedge.cli import paths
from pykvedge.cli.command import option
from pykvedge.errors import KvedgeWarning, UsageError

if TYPE_CHECKING:
    from pykvedge.runtime.sampling import Sampling

_GROUP, _ABOVE_0 = "Sampling", "With --temp above 0"
OPTIONS = (
    option("--max-tokens", "-n", also=("--predict", "--n-predict"), group="Answer", common=True, config=True, type=int,
           default=512, show_default=True, metavar="N", help="The largest number of tokens of an answer."),
    option("--temp", also=("--temperature",), group=_GROUP, common=True, config=True, type=float, default=0.0,
           show_default=True, help="The temperature; 0 always takes the likeliest token."),
    option("--top-p", group=_GROUP, config=True, type=float, default=0.95, show_default=True,
           help=f"{_ABOVE_0}: sample from the fewest tokens with this probability together; 1 is off."),
    option("--top-k", group=_GROUP, config=True, type=int, default=40, show_default=True,
           help=f"{_ABOVE_0}: sample from the N likeliest tokens; 0 is off."),
    option("--min-p", group=_GROUP, config=True, type=float, default=0.0, show_default=True,
           help="With --temp above 0: drop tokens whose probability is below this share of the highest one; 0 is off."),
    option("--typical-p", also=("--typical",), group=_GROUP, type=float, default=1.0, show_default=True,
           help="With --temp above 0: locally typical sampling with this probability; 1 is off."),
    option("--seed", "-s", group=_GROUP, common=True, type=int, help="Make answers with --temp above 0 repeatable."),
    option("--repeat-penalty", group=_GROUP, config=True, type=float, default=1.0, show_default=True,
           help="A value above 1 makes tokens of the answer less likely again; 1 is off."),
    option("--frequency-penalty", group=_GROUP, type=float, default=0.0, show_default=True,
           help="Subtract this value from a token's logit for each occurrence in the answer."),
    option("--presence-penalty", group=_GROUP, type=float, default=0.0, show_default=True,
           help="Subtract this value once from the logits of tokens that occur in the answer."),
    option("--repeat-last-n", group=_GROUP, type=int, default=64, show_default=True, metavar="N",
           help="The three penalties apply to the last N tokens of the answer."),
    option("--logit-bias", group=_GROUP, multiple=True, metavar="ID=BIAS",
           help="Add BIAS to the logit of the token ID, a number or a text; -inf forbids the token; repeatable."),
    option("--grammar", group="Answer", metavar="FILE|TEXT",
           help="The answer follows this grammar, in llama.cpp's GBNF."),
    option("--json-schema", "-j", group="Answer", metavar="FILE|JSON", help="The answer follows this JSON schema."),
    option("--regex", group="Answer", metavar="TEXT",
           help="The whole answer matches this regular expression, in Rust's syntax."),
    option("--logprobs", type=int, metavar="N",
           help="With --json: print the probability of each token, and the N likeliest tokens at its position."),
    option("--stop", group="Answer", multiple=True, metavar="TEXT",
           help="The answer ends before this text; repeatable."),
)  # fmt: skip
_PLAIN = ("temp", "top_p", "top_k", "seed", "max_tokens", "min_p", "typical_p", "repeat_penalty", "frequency_penalty",
          "presence_penalty", "repeat_last_n")  # fmt: skip
_DRAWING = ("top_p", "top_k", "min_p", "typical_p", "seed")
WHOLE = ("top_k", "seed", "max_tokens", "repeat_last_n")
TEXTS = ("logit_bias", "stop", "grammar", "json_schema", "regex")  # settings that are no numbers
SETTINGS = (*_PLAIN, *TEXTS)  # the settings of /set


def chosen(given: Mapping[str, Any]) -> Sampling:
    """Makes the Sampling of OPTIONS. Raises UsageError for an invalid value."""
    from pykvedge.runtime.sampling import Sampling

    plain = {name: given[name] for name in (*_PLAIN, "stop", "regex", "logprobs")}
    forms = {name: form(name, given[name]) for name in ("grammar", "json_schema")}
    return Sampling(**plain, **forms, logit_bias=biases(given["logit_bias"]))


def warn_of_idle(given: Mapping[str, Any]) -> None:
    """Warns about typed options without an effect: at temperature 0 nothing is drawn at random."""
    context = click.get_current_context()
    typed = [name for name in _DRAWING if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if typed and given["temp"] == 0:
        names = ", ".join("--" + name.replace("_", "-") for name in typed)
        warnings.warn(f"{names} has no effect at --temp 0; set --temp above 0", KvedgeWarning, stacklevel=2)


def form(name: str, text: str | None) -> str | Path | None:
    """Returns the text of a grammar or a JSON schema unchanged, and the name of a file as a Path."""
    from pykvedge.grammars.source import is_grammar, is_schema

    is_text = is_grammar if name == "grammar" else is_schema
    if text is not None and not text.strip():
        raise UsageError(f"{name} is empty; give the {name} as text, or name a file")
    return text if text is None or is_text(text) else paths.expanded(Path(text))


def biases(texts: Iterable[str]) -> dict[int | str, float]:
    """Parses texts ID=BIAS or TEXT=BIAS. Raises UsageError for any other text."""
    out: dict[int | str, float] = {}
    for text in texts:
        token, equals, bias = text.rpartition("=")
        try:
            number = float(bias)
        except ValueError:
            equals = ""
        if not (token and equals):
            raise UsageError(f"a logit bias is ID=BIAS, for example 42=-5 or 42=-inf, not '{text}'")
        out[int(token) if token.isascii() and token.isdigit() and len(token) < 20 else token] = number
    return out


def read(name: str, text: str) -> Any:
    """Parses the value of a setting as typed after /set. Raises UsageError for an invalid value."""
    if name == "seed" and text == "random":
        return None
    if name == "logit_bias":
        return biases([] if text == "none" else text.split())
    if name in ("grammar", "json_schema"):
        return None if text == "none" else form(name, text)
    if name == "regex":
        return None if text == "none" else text
    if name == "stop":
        return () if text == "none" else (text.replace("\\n", "\n"),)
    try:
        return int(text) if name in WHOLE else float(text)
    except ValueError:
        kind = "a whole number" if name in WHOLE else "a number"
        raise UsageError(f"{name} must be {kind}, not {text!r}") from None


def shown(sampling: Sampling, name: str) -> object:
    """Returns a setting's value as text that `read` accepts."""
    value = getattr(sampling, name)
    if name == "logit_bias":
        return " ".join(f"{token}={bias:g}" for token, bias in value.items()) or "none"
    if name == "stop":
        return ", ".join(value).replace("\n", "\\n") or "none"
    if name in ("grammar", "json_schema", "regex"):
        return value or "none"
    return "random" if value is None else value

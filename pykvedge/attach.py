"""attach: compression for an existing llama_cpp.Llama, with one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pykvedge.errors import KvedgeError, StateError, UnsupportedError, UsageError
from pykvedge.kvtypes import KvType
from pykvedge.plan import Plan
from pykvedge.presets import default_plan
from pykvedge.presets import plan as make_plan

if TYPE_CHECKING:
    from pykvedge.libkvedge import Stats
    from pykvedge.profile import Given
    from pykvedge.stages.base import ProfileTable


def attach(
    llm: Any,
    method: str | Plan | None = None,
    budget: Any = None,
    *,
    profile: Given = None,
    **settings: Any,
) -> Attachment:
    """Compresses the prompts of a llama_cpp.Llama from now on; everything else is used as before.

        import pykvedge
        from llama_cpp import Llama
        llm = Llama("model.gguf", n_ctx=8192)
        pykvedge.attach(llm, method="lookm", budget=0.2)

    method, budget, settings: as for pykvedge.plan; `method` may be a Plan; None: pykvedge.default_plan.
    What the model had read is forgotten.
    profile: one or several, for methods that need them, instead of what is found by itself (pykvedge/profile.py).
    Raises LibraryError (the model is of a llama_cpp with other libraries), NothingToCompressError, ProfileError,
    UsageError, UnsupportedError.
    """
    if not all(hasattr(llm, name) for name in ("ctx", "eval", "sample", "reset")):
        raise UsageError(f"attach takes a llama_cpp.Llama, not {type(llm).__name__}")
    if "eval" in vars(llm):
        raise StateError("kvedge is attached to this model already; use set_plan of what attach returned, or detach it")
    return Attachment(llm, _plan(method, budget, settings), profile)


def _plan(method: str | Plan | None, budget: Any, settings: dict[str, Any]) -> Plan:
    if method is None:
        return default_plan(budget, **settings)
    if not isinstance(method, Plan):
        return make_plan(method, budget, **settings)
    if budget is not None or settings:
        raise UsageError("a Plan has its budget and settings already; change them with plan.with_(...)")
    return method


class Attachment:
    """What attach returns: figures, another plan, and the way back. Also usable in a with statement."""

    def __init__(self, llm: Any, plan: Plan, profile: Given = None) -> None:
        from pykvedge import libkvedge, libraries

        libraries.llama()  # refuses a llama_cpp that loaded other libraries
        self._llm, self._profile = llm, profile
        self.plan = plan
        tables = self._tables(plan, spare=False)
        _forget(llm)
        self._cache = libkvedge.Cache(llm.ctx, plan, _kv_type(llm), auto_compress=True, profiles=tables)
        self._eval, self._sample = llm.eval, llm.sample
        self._sampled = False
        llm.eval, llm.sample = self._wrapped_eval, self._wrapped_sample
        if hasattr(llm, "_stack"):
            llm._stack.callback(self._cache.detach)  # before llama_free, when the model is closed

    def _tables(self, plan: Plan, spare: bool) -> dict[str, ProfileTable]:
        from pykvedge.profile import tables_for

        return tables_for(plan, self._llm.model_path, self._profile, spare)

    def _wrapped_sample(self, *args: Any, **kwargs: Any) -> int:
        self._sampled = True
        return self._sample(*args, **kwargs)

    def _wrapped_eval(self, tokens: Sequence[int]) -> None:
        """A prompt is complete when something was sampled from it, or when a single token follows it.

        Prompts with images come from a chat handler in pieces, some of a single token: those need the former.
        """
        single = len(tokens) == 1
        generates = single and (self._sampled or getattr(self._llm, "chat_handler", None) is None)
        self._cache.set_auto_compress(generates)
        try:
            self._eval(tokens)
        except RuntimeError as error:
            try:
                self._cache.check()
            except KvedgeError as reason:
                raise reason from error
            raise
        finally:
            self._sampled = False
            self._cache.set_auto_compress(True)

    def stats(self) -> Stats:
        """Figures of the sequence: fields as in kvedge_stats, bytes and microseconds. Raises StateError if detached."""
        return self._cache.stats()

    def kept(self) -> list[list[int]]:
        """KV pairs held now, per layer and KV head."""
        return self._cache.lengths()

    def set_plan(self, method: str | Plan, budget: Any = None, **settings: Any) -> None:
        """Prompts that complete from now on are compressed by this plan."""
        plan = _plan(method, budget, settings)
        self._cache.set_plan(plan, self._tables(plan, spare=True))
        self.plan = plan

    def detach(self) -> None:
        """Gives the model back as it was; what it had read is forgotten. Does nothing the second time."""
        if self._cache.attached:
            self._cache.detach()
            del self._llm.eval, self._llm.sample
            _forget(self._llm)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _forget(llm: Any) -> None:
    from pykvedge import libraries

    bindings = libraries.llama()
    llm.reset()
    memory = bindings.llama_get_memory(llm.ctx)
    if memory is not None:
        bindings.llama_memory_clear(memory, True)


def _kv_type(llm: Any) -> KvType:
    from pykvedge.context import GGML_TYPE

    known = {number: name for name, number in GGML_TYPE.items()}
    wanted = llm.context_params.type_k, llm.context_params.type_v
    if not set(wanted) <= set(known):
        raise UnsupportedError(
            f"kvedge stores keys and values as {', '.join(GGML_TYPE)}; make the model with one of these as type_k and "
            "type_v, or leave them out"
        )
    return KvType(known[wanted[0]], known[wanted[1]])

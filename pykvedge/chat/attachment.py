"""Attaches kvedge to an existing llama_cpp.Llama, which then compresses its prompts."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from pykvedge.chat.attached_pass import AttachedPass
from pykvedge.chat.attached_state import AttachedState, States, recipe
from pykvedge.chat.reuse import History, shared
from pykvedge.errors import CancelledError, KvedgeError, KvedgeWarning, StateError, UnsupportedError, UsageError
from pykvedge.library import libkvedge
from pykvedge.library.native_plan import replays
from pykvedge.models import tuned
from pykvedge.models.profiles import tables_for
from pykvedge.native import libraries
from pykvedge.native.abi import Stats
from pykvedge.plans.making import default_plan
from pykvedge.plans.making import plan as make_plan
from pykvedge.plans.plan import Plan
from pykvedge.plans.profile import Given
from pykvedge.reference.kvtypes import KvType, ggml_types
from pykvedge.reference.stages.base import ProfileTable
from pykvedge.runtime.llama_context import take_back
from pykvedge.runtime.settings import Keep
from pykvedge.system import signals
from pykvedge.system.guard import Guard, one_thread, undoing


def attach(
    llm: Any,
    method: str | Plan | None = None,
    budget: Any = None,
    *,
    profile: Given = None,
    keep: str | Keep = "",
    **settings: Any,
) -> Attachment:
    """Compresses the prompts of a llama_cpp.Llama from now on; its other behaviour stays.

        import pykvedge
        from llama_cpp import Llama
        llm = Llama("model.gguf", n_ctx=8192)
        pykvedge.attach(llm, method="kvedge", budget=0.2)

    method, budget, settings: as in pykvedge.plan; `method` may be a Plan. By default the plan is `kvedge tune`'s choice
    for the model (then `tuned` of the result says so), or pykvedge.default_plan.
    Forgets what the model has read. Earlier states and caches raise StateError until detach.
    profile: one or several profiles for methods that need them, instead of the model's own (pykvedge/plans/profile.py).
    keep: whole rows stay behind compressed rows, in "ram", on "disk", or by a Keep. A request that adds to the read
    text is then answered over all rows, as if it were one prompt. Not for methods with a second pass.
    Raises LibraryError (the llama_cpp uses other libraries), NothingToCompressError, ProfileError, UsageError,
    UnsupportedError, StateError (closed, or attached already).
    """
    if isinstance(llm, type) or not all(hasattr(llm, name) for name in ("ctx", "eval", "sample", "reset")):
        raise UsageError(f"attach takes a llama_cpp.Llama, not {type(llm).__name__}")
    if not llm.ctx:
        raise StateError("this model is closed; create a new llama_cpp.Llama")
    if "eval" in vars(llm):
        raise StateError(
            "kvedge is already attached to this model; call set_plan or detach of the Attachment that attach returned"
        )
    kept, line = keep if isinstance(keep, Keep) else Keep.of(keep), ""
    if method is None and not settings and profile is None:
        method, line = tuned.plan_or_default(llm.model_path, budget, second_pass=kept is None)
        budget = None
    made = Attachment(llm, _plan(method, budget, settings), profile, kept)
    made.tuned = line
    return made


def _plan(method: str | Plan | None, budget: Any, settings: dict[str, Any]) -> Plan:
    if method is None:
        return default_plan(budget, **settings)
    if not isinstance(method, Plan):
        return make_plan(method, budget, **settings)
    if budget is not None or settings:
        raise UsageError("a Plan excludes budget and settings; change the plan with plan.with_(...)")
    return method


WRAPPED = ("eval", "sample", "generate", "create_chat_completion", "save_state", "load_state")


class Attachment:
    """The result of attach: gives figures, changes the plan, and detaches. Usable in a with statement.

    Only the thread that uses the model may use it: a call during another thread's call raises StateError. `detach`, and
    closing the model, wait for the current token; the generation then ends with StateError.
    """

    @signals.held()
    def __init__(self, llm: Any, plan: Plan, profile: Given = None, keep: Keep | None = None) -> None:
        libraries.llama()  # raises for a llama_cpp that loaded other libraries
        self._llm, self._profile = llm, profile
        self.plan, self.tuned = plan, ""
        self.guard = Guard("model", over="kvedge was detached from the model; attach kvedge again")
        self._given = self._tables(plan, spare=False)
        folder = keep.made_folder() if keep is not None else ""
        if keep is not None:
            _check_kept(plan)
        _forget(llm)
        self._kv_type = _kv_type(llm)
        self._cache = libkvedge.Cache(llm.ctx, plan, self._kv_type, auto_compress=True, profiles=self._given)
        if keep is not None:
            with undoing(self._cache.detach):
                self._cache.keep(keep.place, folder, keep.space, keep.type)
        self._second_pass = AttachedPass(llm, self._cache)
        self._second_pass.look()
        self._states = States(llm, self._cache, self._second_pass)
        self._history = History()
        self._sampled = False
        self._asked: Any = None  # generator of the last request
        self._inner = {name: getattr(llm, name) for name in WRAPPED if hasattr(llm, name)}
        for name in self._inner:
            setattr(llm, name, getattr(self, f"_wrapped_{name}"))
        if hasattr(llm, "_stack"):
            llm._stack.callback(_release_if_there, weakref.ref(self))  # before llama_free

    def _tables(self, plan: Plan, spare: bool) -> dict[str, ProfileTable]:
        return tables_for(plan, self._llm.model_path, self._profile, spare)

    def _release(self) -> None:
        if self._cache.attached:
            with self.guard.closing():
                self._second_pass.close()
                self._cache.detach()

    def _wrapped_sample(self, *args: Any, **kwargs: Any) -> int:
        with self.guard:
            self._sampled = True
            return self._inner["sample"](*args, **kwargs)

    def _wrapped_create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        with self.guard:
            return self._inner["create_chat_completion"](*args, **kwargs)

    def _wrapped_generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        inner, tokens = self._inner["generate"], list(tokens)
        if getattr(self._llm, "draft_model", None) is not None:
            warnings.warn("draft_model has no effect while kvedge is attached; use pykvedge.Session(..., lookup=True)",
                          KvedgeWarning, stacklevel=2)  # fmt: skip
        given = inspect.signature(inner).bind(tokens, *args, **kwargs).arguments
        with self.guard:
            if given.get("reset", True):
                self._begin(tokens)
            steps = inner(tokens, *args, **kwargs)
            self._asked, n_tokens = steps, self._llm.n_tokens
        answer = None
        try:
            while True:
                with self.guard:
                    if self.guard.ending:  # a chat completion holds the guard: only this ends it
                        raise StateError("kvedge was detached from the model during an answer; attach kvedge again")
                    if signals.pending():
                        raise CancelledError
                    if self._asked is not steps or self._llm.n_tokens != n_tokens:
                        raise StateError(
                            "the model has read other tokens since the last token of this answer; send "
                            "the request again"
                        )
                    try:
                        with _undrafted(self._llm):
                            token = steps.send(answer)
                    except StopIteration:
                        return
                    n_tokens = self._llm.n_tokens
                answer = yield token
        finally:
            steps.close()

    def _begin(self, tokens: list[int]) -> None:
        """Leaves in the cache only what a new request can continue from."""
        llm, history = self._llm, self._history
        n = llm.n_tokens
        gone = self._cache.stats().n_tokens < n  # functions of llama.h removed tokens
        if n > 0 and history.uncut and not gone:
            return  # llama_cpp reuses an uncompressed cache well
        same = shared(llm.input_ids[:n], tokens)
        if (whole := self._whole_tokens()) and same >= whole and len(tokens) > whole:
            n = self._take_back(whole)
            same = min(same, n)
        if self._cache.keeps and len(tokens) - n == 1 and history.knows(n):
            n = same = 0  # a single new token would pass for an answer's token: no rows would be chosen
        fresh = len(tokens) > n or not getattr(llm, "_requires_eval", True)
        if n == 0 or gone or same < n or not fresh or history.failed:
            reads, requests = history.all() if gone and same == n and fresh else history.before(same)
            llm.reset()
            history.clear(self._is_uncut(self.plan))
            for read in reads:
                self._read(read.tokens, read.generated)
            history.again(requests)
        history.begin()

    def _whole_tokens(self) -> int:
        """Returns the number of first tokens, before the last answer, that have whole rows; 0 without whole rows."""
        if not self._cache.keeps or not self._cache.stats().whole_bytes:
            return 0
        return self._history.prompt_tokens(self._llm.n_tokens)

    def _take_back(self, n_tokens: int) -> int:
        """Removes the tokens behind the first n_tokens. Whole rows then cover the answer when it is read again."""
        llm = self._llm
        if n_tokens < llm.n_tokens and take_back(libraries.llama(), llm.ctx, 0, n_tokens):
            llm.n_tokens = n_tokens
            self._history.cut(n_tokens)
        return llm.n_tokens

    def _is_uncut(self, plan: Plan) -> bool:
        return plan.budget.ratio == 1.0 and not self._kv_type.quantised

    def _wrapped_eval(self, tokens: Sequence[int]) -> None:
        """Reads tokens. A prompt is complete when a token was sampled from it, or when a single token follows it.

        A chat handler's prompt comes in pieces, some of a single token, so only sampling completes it.
        """
        with self.guard:
            generates = len(tokens) == 1 and (self._sampled or getattr(self._llm, "chat_handler", None) is None)
            self._read(tokens, generates)

    def _read(self, tokens: Sequence[int], generates: bool) -> None:
        n_before = self._llm.n_tokens
        if n_before == 0 and not self._history.knows(0):
            self._history.clear(self._is_uncut(self.plan))
        self._cache.set_auto_compress(generates)
        try:
            if generates:
                with undoing(self._history.fail):  # also after Ctrl-C: the logits of the prompt are lost
                    self._second_pass.before_answer(self.plan)
            self._inner["eval"](tokens)
            self._history.note(n_before, tokens, generates)
            self._second_pass.read(n_before, list(tokens), generates)
        except RuntimeError as error:
            self._history.fail()
            try:
                self._cache.check()
            except KvedgeError as reason:
                raise reason from error
            raise
        finally:
            self._sampled = False
            self._cache.set_auto_compress(True)

    def _wrapped_save_state(self) -> AttachedState:
        with self.guard:
            return self._states.take(self._recipe(), self._history)

    def _wrapped_load_state(self, state: Any) -> None:
        """Loads a state: restores rows of an equal plan, and reads the tokens of other states again under this plan."""
        with self.guard:
            as_it_is = self._states.check(state, self._recipe())
            _forget(self._llm)
            self._history.clear(self._is_uncut(self.plan))
            if as_it_is:
                self._states.give(state)
                self._history = state.history.copy()
            else:
                reads, requests = state.history.all()
                for read in reads:
                    self._read(read.tokens, read.generated)
                self._history.again(requests)
            self._states.enter(state)

    def _recipe(self) -> str:
        keeps, lora = " keep" if self._cache.keeps else "", getattr(self._llm, "lora_path", None)
        adapter = f" {lora} {self._llm.lora_scale}" if lora else ""
        return recipe(self.plan, self._kv_type, self._given) + keeps + adapter

    @one_thread
    def stats(self) -> Stats:
        """Returns the figures of kvedge_stats for the sequence, in bytes and us. Raises StateError after detach."""
        return self._cache.stats()

    @property
    def keep_problem(self) -> str:
        """Returns why requested whole rows are missing, or an empty string."""
        return self._cache.keep_problem()

    @property
    def replay_s(self) -> float:
        """Returns the seconds of the last second pass over a prompt; 0: no second pass."""
        return self._second_pass.seconds

    @one_thread
    def kept(self) -> list[list[int]]:
        """Returns the current KV pairs per layer and KV head."""
        return self._cache.lengths()

    @one_thread
    def set_plan(self, method: str | Plan, budget: Any = None, **settings: Any) -> None:
        """Sets the plan of later prompts. Raises the errors of `attach`."""
        plan = _plan(method, budget, settings)
        if self._cache.keeps:
            _check_kept(plan)
        given = self._tables(plan, spare=True)
        self._cache.set_plan(plan, given)
        self._second_pass.look()
        self.plan = plan
        self._given = given
        self._history.uncut = self._history.uncut and self._is_uncut(plan)

    def detach(self) -> None:
        """Restores the model, and forgets what it has read. A second call does nothing."""
        if not self._cache.attached:
            return
        with self.guard.closing():
            if self._cache.attached:
                self._second_pass.close()
                self._cache.detach()
                for name in self._inner:
                    delattr(self._llm, name)
                _forget(self._llm)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _release_if_there(found: weakref.ref[Attachment]) -> None:
    """Releases the cache of a closing model, unless the attachment was detached and freed before."""
    if (attachment := found()) is not None:
        attachment._release()


@contextmanager
def _undrafted(llm: Any) -> Generator[None]:
    """Hides the draft model: several guesses at once would look like a prompt, and would be compressed as a prompt."""
    drafts, llm.draft_model = getattr(llm, "draft_model", None), None
    try:
        yield
    finally:
        llm.draft_model = drafts


def _check_kept(plan: Plan) -> None:
    if replays(plan):
        raise UsageError(
            f"attach cannot combine keep with method '{plan.method}', which reads the conversation twice; omit keep, "
            f"or use pykvedge.Session"
        )


def _forget(llm: Any) -> None:
    bindings = libraries.llama()
    llm.reset()
    memory = bindings.llama_get_memory(llm.ctx)
    if memory is not None:
        bindings.llama_memory_clear(memory, True)


def _kv_type(llm: Any) -> KvType:
    known = {number: name for name, number in ggml_types().items()}
    wanted = llm.context_params.type_k, llm.context_params.type_v
    if not set(wanted) <= set(known):
        raise UnsupportedError(
            f"type_k or type_v of the model is not supported; create the model with one of "
            f"{', '.join(known.values())}, or omit type_k and type_v"
        )
    return KvType(known[wanted[0]], known[wanted[1]])

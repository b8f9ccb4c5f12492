"""A lazy grammar begins at a trigger: before it everything is allowed, after it only what the grammar allows."""

import pytest

from pykvedge import GrammarError, Sampling
from pykvedge.grammars.source import Lazy
from pykvedge.runtime.grammar import Grammar

CALL = 'root ::= "<call>" [a-c]+ "</call>"'


@pytest.fixture(scope="module")
def model(tiny):
    with tiny("llama").session() as session:
        yield session.model


def follow(model, lazy, text):
    """Feeds an answer token by token. Returns the accepted text, and the grammar."""
    grammar, taken = Grammar(Sampling(grammar=lazy), model), b""
    for token in (token for character in text for token in model.table().cut(character.encode())):
        if grammar.take(token) is not None:
            break
        taken += model.piece(token)
    return taken.decode(), grammar


@pytest.mark.parametrize(
    ("lazy", "text", "taken"),
    [
        (Lazy(CALL, words=("<call>",)), "free <call>abc</call>", "free <call>abc</call>"),
        (Lazy(CALL, words=("<call>",)), "free <call>abd</call>", "free <call>ab"),
        (Lazy(CALL, words=("<cal",)), "free <call>abc</call> more", "free <call>abc</call>"),
        (Lazy(CALL, words=("<other>",)), "free <call>xyz</call>", "free <call>xyz</call>"),
        (Lazy(CALL), "free", ""),
        (Lazy(CALL), "<call>ax", "<call>a"),
        (Lazy(CALL, patterns=(r"(?:go|run) *(<call>)",)), "<call>x run <call>abx", "<call>x run <call>ab"),
        (Lazy('root ::= "go" [0-9]+', patterns=(r"go[0-9]",)), "a go x go17 ", "a go x go17"),
        (Lazy(CALL, words=("<call>",), thinking=("<t>", "</t>")), "<t><call>x</t> <call>abx",
         "<t><call>x</t> <call>ab"),
        (Lazy(CALL, words=("<call>",), thinking=("<t>", "</t>"), prefix="<t>"), "<call>x</t><call>abx",
         "<call>x</t><call>ab"),
        (Lazy(CALL, words=("<call>",), prefix="x <ca"), "ll>abx", "ll>ab"),
        (Lazy(CALL, prefix="<call>a"), "bx", "b"),
        (Lazy('root ::= "\u00e9" [0-9]', words=("\u00e9",)), "x \u00e95x", "x \u00e95"),
    ],
)  # fmt: skip
def test_it_holds_from_the_trigger_on(model, lazy, text, taken):
    assert follow(model, lazy, text)[0] == taken


def test_an_answer_may_end_before_the_trigger_and_where_the_grammar_is_whole(model):
    end = next(token for token in range(model.n_vocab) if model.is_end(token))
    lazy = Lazy(CALL, words=("<call>",))
    for text, whole in (("", True), ("free", True), ("<call>ab", False), ("<call>ab</call>", True)):
        _, grammar = follow(model, lazy, text)
        assert (grammar.take(end) is None) == whole, text


def test_special_tokens_stand_for_their_text_where_they_are_preserved(model):
    unseen = [t for t in range(model.n_vocab) if model.is_unseen(t) and not model.is_end(t) and model.written(t)]
    mark, other = unseen[0], unseen[1]
    text = model.written(mark)
    begin, inside = f'root ::= "{text}" [a-c]', f'root ::= "x{text}y"'
    for lazy in (Lazy(begin, tokens=(mark,)), Lazy(begin, words=(text,), preserved=(mark,))):
        grammar = Grammar(Sampling(grammar=lazy), model)
        for token in (*model.table().cut(b"free "), mark):
            assert grammar.take(token) is None
        possible = grammar.take(other)
        assert {model.piece(t) for t in possible.nonzero()[0].tolist()} == {b"a", b"b", b"c"}
    grammar = Grammar(Sampling(grammar=Lazy(inside, preserved=(mark,))), model)
    (x,) = model.table().cut(b"x")
    assert grammar.take(x) is None
    assert grammar.take(other)[mark] and not grammar.take(other)[other]
    assert grammar.take(mark) is None
    grammar = Grammar(Sampling(grammar=inside), model)
    assert grammar.take(x) is None
    assert not grammar.take(mark)[mark]


def test_what_calls_the_grammar_has_to_fit_it(model):
    with pytest.raises(GrammarError, match="in a form that the grammar does not allow"):
        follow(model, Lazy(CALL, words=("call",)), "free <call>")
    with pytest.raises(GrammarError, match="in a form that the grammar does not allow"):
        Grammar(Sampling(grammar=Lazy(CALL, prefix="free")), model)
    with pytest.raises(GrammarError, match="pattern"):
        Lazy(CALL, patterns=("(",))
    with pytest.raises(GrammarError, match="cannot be used"):
        Grammar(Sampling(grammar=Lazy("root ::= other", words=("x",))), model)

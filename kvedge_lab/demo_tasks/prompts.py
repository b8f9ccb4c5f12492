"""How pictures and questions are put into a prompt: the words the models were trained on. noun: "image" or "page"."""

from __future__ import annotations

MEDIA = "<__media__>"
SHOW_ANSWER = "ok"


def image_text(count: int, noun: str = "image") -> str:
    """The pictures of a user turn: a single one stands alone, several are numbered."""
    return MEDIA if count == 1 else "\n".join(f"{noun.capitalize()} {k + 1}: {MEDIA}" for k in range(count))


def show_text(count: int, noun: str = "image") -> str:
    """What the first turn says when the question only comes in the second."""
    return f"Here is the {noun}." if count == 1 else f"Here are the {noun}s."


def messages(count: int, question: str, second_turn: bool = False, noun: str = "image") -> list[dict[str, str]]:
    """The conversation up to the question: pictures first, one media marker for each."""
    if not second_turn:
        return [{"role": "user", "content": f"{image_text(count, noun)}\n{question}"}]
    return [
        {"role": "user", "content": f"{image_text(count, noun)}\n{show_text(count, noun)}"},
        {"role": "assistant", "content": SHOW_ANSWER},
        {"role": "user", "content": question},
    ]

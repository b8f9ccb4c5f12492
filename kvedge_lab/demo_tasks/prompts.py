"""The wording of prompts with pictures, as in the models' training. noun: "image" or "page"."""

from __future__ import annotations

MEDIA = "<__media__>"
SHOW_ANSWER = "ok"


def image_text(count: int, noun: str = "image") -> str:
    """Returns the pictures of a user turn: a single picture has no label, several pictures are numbered."""
    return MEDIA if count == 1 else "\n".join(f"{noun.capitalize()} {k + 1}: {MEDIA}" for k in range(count))


def show_text(count: int, noun: str = "image") -> str:
    """Returns the text of the first turn, if the question only comes in the second turn."""
    return f"Here is the {noun}." if count == 1 else f"Here are the {noun}s."


def messages(count: int, question: str, second_turn: bool = False, noun: str = "image") -> list[dict[str, str]]:
    """Returns the conversation up to the question: pictures first, with one media marker each."""
    if not second_turn:
        return [{"role": "user", "content": f"{image_text(count, noun)}\n{question}"}]
    return [
        {"role": "user", "content": f"{image_text(count, noun)}\n{show_text(count, noun)}"},
        {"role": "assistant", "content": SHOW_ANSWER},
        {"role": "user", "content": question},
    ]

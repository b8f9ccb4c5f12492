"""How images and questions are put into a prompt: the words the model was trained on."""

from __future__ import annotations

MEDIA = "<__media__>"
SHOW_ANSWER = "ok"


def image_text(count: int) -> str:
    """The images of a user turn: a single one stands alone, several are numbered."""
    if count == 1:
        return MEDIA
    return "\n".join(f"Image {k + 1}: {MEDIA}" for k in range(count))


def show_text(count: int) -> str:
    """What the first turn says when the question only comes in the second."""
    return "Here is the image." if count == 1 else "Here are the images."


def messages(count: int, question: str, second_turn: bool = False) -> list[dict[str, str]]:
    """The conversation up to the question: images first, one media marker for each."""
    if not second_turn:
        return [{"role": "user", "content": f"{image_text(count)}\n{question}"}]
    return [
        {"role": "user", "content": f"{image_text(count)}\n{show_text(count)}"},
        {"role": "assistant", "content": SHOW_ANSWER},
        {"role": "user", "content": question},
    ]

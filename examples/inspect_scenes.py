"""A task of inspect-ai: questions about the scenes here, asked of `kvedge serve`; a plan is a part of the model's name.

    pip install inspect-ai openai
    kvedge serve &
    export OPENAI_BASE_URL=http://127.0.0.1:8137/v1 OPENAI_API_KEY=none
    inspect eval examples/inspect_scenes.py --model openai/demo-model,openai/demo-model@lookm-0.2 -M responses_api=false
"""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, ContentImage, ContentText, GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

HERE, ASKED = Path(__file__).parent, "What is the code?"
CODES = {"scene-1.png": "64UM3", "scene-2.png": "4LPY5", "scene-3.png": "2L4T", "scene-4.png": "EEAUF4"}


@task
def scenes() -> Task:
    samples = [
        Sample(
            input=[ChatMessageUser(content=[ContentImage(image=str(HERE / name)), ContentText(text=ASKED)])],
            target=code,
            id=name,
        )
        for name, code in CODES.items()
    ]
    return Task(samples, solver=generate(), scorer=includes(), config=GenerateConfig(temperature=0, max_tokens=24))

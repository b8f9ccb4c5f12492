"""Asks about a picture with llama-cpp-python, whose KV cache kvedge compresses: python examples/attach_picture.py

MTMDChatHandler writes the prompt by the model's own chat template, so it suits every model with an mmproj file.
"""

import base64
import sys
from pathlib import Path

import pykvedge  # before llama_cpp

# isort: split
from llama_cpp import Llama
from llama_cpp.llama_chat_format import MTMDChatHandler

DATA, HERE = Path(pykvedge.__file__).parent / "data", Path(__file__).parent


def main(picture=HERE / "scene-1.png", question="What is the code?"):
    handler = MTMDChatHandler(clip_model_path=str(DATA / "demo-mmproj.gguf"), verbose=False)
    llm = Llama(str(DATA / "demo-model.gguf"), chat_handler=handler, n_ctx=2048, verbose=False)
    attachment = pykvedge.attach(llm, method="kvedge", budget=0.2)
    url = "data:image/png;base64," + base64.b64encode(Path(picture).read_bytes()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    answer = llm.create_chat_completion([{"role": "user", "content": content}], temperature=0.0, repeat_penalty=1.0)
    print(answer["choices"][0]["message"]["content"].strip())
    print(attachment.stats(), file=sys.stderr)
    llm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

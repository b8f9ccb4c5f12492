"""Short chat templates in the dialects of released models' tool calls, and tiny models with these templates."""

import json
from pathlib import Path

from modelgen import tokens
from modelgen.text import TextSpec, text_model
from modelgen.writer import write_gguf

WORKER = (Path(__file__).with_name("serve_worker.py"),)  # the program of a server, for `serving`


def model(folder, template, specials=()):
    """Writes a model with random weights and 640 tokens. specials: texts of special tokens, the last tokens."""
    path = folder / "m.gguf"
    write_gguf(path, *text_model(TextSpec("llama", tokens.spm(640, template, specials), 2, 4, 2, 32, 128, 2048)))
    return path


def gbnf(text):
    """Returns the grammar whose only answer is this text."""
    return "root ::= " + json.dumps(text, ensure_ascii=False)


# Hermes: Qwen 2.5 and 3, and many other models. The reasoning has the form of Qwen 3.
HERMES = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>\n"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": "
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Mistral Nemo: a special token, then a list
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS][{% for t in tools %}{{ t | tojson }}{% endfor %}][/AVAILABLE_TOOLS]"
    "{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}, \"id\": \"{{ c.id }}\"}"
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{\"content\": {{ m.content }}, \"call_id\": \"{{ m.tool_call_id }}\"}"
    "[/TOOL_RESULTS]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Qwen 3 Coder: each argument is a tag, without JSON
CODER = (
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}\n<function>\n<name>{{ t.function.name }}</name>\n"
    "</function>{% endfor %}\n</tools>\n<tool_call>\n<function=example>\n<parameter=a>\nvalue\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for name, value in c.function.arguments | items %}<parameter={{ name }}>\n{{ value }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# gpt-oss: channels between special tokens
HARMONY = (
    "{% if tools %}<|start|>developer<|message|># Tools\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>"
    "{% endif %}{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

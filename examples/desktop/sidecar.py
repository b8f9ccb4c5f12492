"""The other way: `kvedge serve` as a process beside the program, for programs in any language and crashes kept apart.

python examples/desktop/sidecar.py PICTURE QUESTION [OPTIONS OF kvedge serve]
"""

import base64
import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def serving(*options: str) -> Iterator[str]:
    """Runs `kvedge serve` on a free port, and gives its URL. It ends with the block, or however this program ends:
    by --parent-pid, and because its stdin is a pipe of ours.
    """
    command = [sys.executable, "-m", "pykvedge", "serve", "--port", "0", "--parent-pid", str(os.getpid()), *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            raise RuntimeError(f"kvedge serve ended with exit code {process.wait()}; stderr says why")
        yield json.loads(line)["url"]
    finally:
        process.communicate()  # closes its stdin, and waits


def ask(url: str, picture: Path, question: str) -> str:
    """Returns the answer to a question about a PNG file."""
    data = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": data}}, {"type": "text", "text": question}]
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        with serving(*sys.argv[3:]) as url:
            print(ask(url, Path(sys.argv[1]), sys.argv[2]))
    except (OSError, RuntimeError) as error:  # urllib's are OSErrors
        sys.exit(f"error: {error}")

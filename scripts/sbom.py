"""Writes a CycloneDX document about a wheel: each piece of other projects' code, its version and licence.

    scripts/sbom.py --llama DIR [--mingw] --out kvedge.cdx.json

CMake calls this script and puts the file into the wheel (PEP 770). PARTS is the only list: the licence of
pyproject.toml, the texts in licenses/ and tests/test_release.py follow it. The same sources give the same bytes.
"""

import argparse
import json
import re
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for builds under PYTHONSAFEPATH
import llama_source
from llama_source import ROOT, SourceError, ended

PAGE = "pykvedge/serve/page_files/vendor"
TEXTS = ROOT / "licenses"


@dataclass(frozen=True)
class Part:
    """One piece of other projects' code: the place of its source, and its licence as SPDX names it."""

    name: str
    license: str
    source: str  # path below llama.cpp's folder; for parts of the page: below kvedge's
    purl: str = ""
    version: str = ""  # a regular expression that finds the version in the source; empty: the source has no version
    mingw: bool = False  # only in the wheel for Windows

    def text(self) -> Path:
        """Returns the file with the licence's text."""
        return (ROOT / PAGE if self.source.startswith(PAGE) else TEXTS) / f"LICENSE-{self.name}"


PARTS = (
    Part("llama.cpp", "MIT", "", "pkg:github/ggml-org/llama.cpp"),
    Part("llama-cpp-python", "MIT", "", "pkg:pypi/llama-cpp-python"),
    Part("llamafile", "MIT", "ggml/src/ggml-cpu/llamafile/sgemm.cpp"),
    Part("yarn", "MIT", "ggml/src/ggml-cpu/ops.cpp"),
    Part("pillow-resample", "MIT-CMU", "tools/mtmd/mtmd-image.cpp"),
    Part("nlohmann-json", "MIT", "vendor/nlohmann/json.hpp", "pkg:github/nlohmann/json",
         r"JSON_VERSION_MAJOR (\d+).*?JSON_VERSION_MINOR (\d+).*?JSON_VERSION_PATCH (\d+)"),
    Part("miniaudio", "Unlicense OR MIT-0", "vendor/miniaudio/miniaudio.h", "pkg:github/mackron/miniaudio",
         r"MA_VERSION_MAJOR +(\d+).*?MA_VERSION_MINOR +(\d+).*?MA_VERSION_REVISION +(\d+)"),
    Part("stb", "MIT OR Unlicense", "vendor/stb/stb_image.h", "pkg:github/nothings/stb", r"stb_image - v(\d+)\.(\d+)"),
    Part("subprocess", "Unlicense", "vendor/sheredom/subprocess.h", "pkg:github/sheredom/subprocess.h"),
    Part("xxhash", "BSD-2-Clause", "vendor/hash/xxhash/xxhash.h", "pkg:github/Cyan4973/xxHash",
         r"XXH_VERSION_MAJOR +(\d+).*?XXH_VERSION_MINOR +(\d+).*?XXH_VERSION_RELEASE +(\d+)"),
    Part("rotate-bits", "MIT", "vendor/hash/rotate-bits/rotate-bits.h", "pkg:github/jb55/rotate-bits.h"),
    Part("marked", "MIT AND BSD-3-Clause", f"{PAGE}/marked.esm.js", "pkg:npm/marked", r"marked v(\d+)\.(\d+)\.(\d+)"),
    Part("dompurify", "MPL-2.0 OR Apache-2.0", f"{PAGE}/purify.min.js", "pkg:npm/dompurify",
         r"DOMPurify (\d+)\.(\d+)\.(\d+)"),
    Part("regenerator-runtime", "MIT", f"{PAGE}/purify.min.js", "pkg:npm/regenerator-runtime"),
    Part("gcc-runtime", "GPL-3.0-or-later WITH GCC-exception-3.1", "", mingw=True),
    Part("winpthreads", "MIT AND BSD-3-Clause", "", mingw=True),
)  # fmt: skip
# code without a licence text: in the public domain, or llama.cpp's own
PUBLIC_DOMAIN = ("vendor/hash/sha1", "vendor/hash/sha256", "vendor/hash/hash.")


def licence() -> str:
    """Returns one SPDX expression of the licences of kvedge and of all parts in the Linux wheel."""
    found = {"MIT"}
    for part in PARTS:
        if not part.mingw:
            found.update(f"({one})" if " OR " in one else one for one in part.license.split(" AND "))
    return " AND ".join(sorted(found, key=lambda one: (one != "MIT", one)))


def pyproject(field: str) -> str:
    """Returns the value of a field of pyproject.toml, a text in one line (tomllib needs Python 3.11)."""
    found = re.search(rf'^{field} = "([^"]*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if not found:
        raise SourceError(f"pyproject.toml has no {field} in one line")
    return found[1]


def component(part: Part, llama: Path) -> dict[str, object]:
    """Returns the entry of a part. Raises SourceError if its version is not found."""
    made: dict[str, object] = {"type": "library", "bom-ref": part.name, "name": part.name}
    version = ""
    if part.name in ("llama.cpp", "llama-cpp-python"):
        # the pinned file is llama-cpp-python's source distribution, which contains llama.cpp
        version = llama_source.VERSION if part.name == "llama-cpp-python" else ""
        made["hashes"] = [{"alg": "SHA-256", "content": llama_source.SHA256}]
        made["properties"] = [{"name": "kvedge:from", "value": llama_source.SDIST}]
    if part.version:
        source = (ROOT if part.source.startswith(PAGE) else llama) / part.source
        found = re.search(part.version, source.read_text(encoding="utf-8"), re.DOTALL)
        if not found:
            raise SourceError(f"{source} does not say its version any more: see PARTS of scripts/sbom.py")
        version = ".".join(found.groups())
    if version:
        made["version"] = version
    made["licenses"] = [{"expression": part.license}]
    if part.purl:
        made["purl"] = f"{part.purl}@{version}" if version else part.purl
    return made


def document(llama: Path, mingw: bool) -> dict[str, object]:
    version = pyproject("version")
    parts = [part for part in PARTS if mingw or not part.mingw]
    components = [component(part, llama) for part in parts]
    own = {"type": "library", "bom-ref": "kvedge", "name": "kvedge", "version": version,
           "licenses": [{"expression": "MIT"}], "purl": f"pkg:pypi/kvedge@{version}"}  # fmt: skip
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([own, components]))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json", "bomFormat": "CycloneDX", "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}", "version": 1, "metadata": {"component": own}, "components": components,
        "dependencies": [{"ref": "kvedge", "dependsOn": [part.name for part in parts]}],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, metavar="DIR", help="llama.cpp's sources")
    parser.add_argument("--mingw", action="store_true", help="with the compiler's libraries for Windows")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    args.out.write_text(json.dumps(document(args.llama, args.mingw), indent=1) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    sys.exit(ended(main))

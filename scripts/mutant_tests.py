"""Which test files are likely to notice a change of a module: those that name it, what is changed, or its room."""

import re
from collections.abc import Iterable
from pathlib import Path


class LikelyTests:
    """Ranks the test files of a tree by what their texts name."""

    def __init__(self, root: Path) -> None:
        self._texts = {path.name: path.read_text(encoding="utf-8") for path in (root / "tests").glob("test_*.py")}

    def _naming(self, word: str) -> set[str]:
        found = re.compile(rf"\b{re.escape(word)}\b")
        return {test for test, text in self._texts.items() if found.search(text)}

    def of(self, path: str, inside: Iterable[str]) -> list[str]:
        """Lists the test files for a change of a file of the package, the likeliest first.

        path: relative to the tree. inside: the functions and classes around the change.
        """
        module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        package, _, stem = module.rpartition(".")
        mine, room = stem.replace("_", ""), package.rpartition(".")[2]
        names = [name for name in inside if not name.startswith("__") and len(name) > 3]
        naming = [self._naming(word) for word in (*names, stem, module)]
        imported = f"from {package} import"

        def score(test: str) -> float:
            of, text = test.removeprefix("test_").removesuffix(".py").replace("_", ""), self._texts[test]
            alike = 6 if of in (mine, room + mine) else 3 if mine in of or of in mine or of == room else 0
            named = sum(len(tests) ** -0.5 for tests in naming if test in tests)  # a word that few name says more
            return 5 * named + alike + (imported in text and stem in text)

        return [f"tests/{test}" for test in sorted(self._texts, key=lambda test: (-score(test), test)) if score(test)]

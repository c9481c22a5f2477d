"""One word for one thing: class names are unique, and the glossary's ruled-out words are not used."""

import ast
import re
from collections import Counter
from pathlib import Path

from lab.house.measure import glossary_of, ruled_out

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_class_names_are_unique() -> None:
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in SOURCES]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_source_avoids_words_that_the_glossary_rules_out() -> None:
    found = {file: ruled_out(file.read_text(encoding="utf-8"), glossary_of(ROOT)) for file in SOURCES}
    assert {str(file.relative_to(ROOT)): words for file, words in found.items() if words} == {}


def test_pages_avoid_them_too() -> None:
    found = {}
    for page in PAGES:
        if page.name != "log.md" and "measured" not in page.parts:  # a diary and recorded rows keep their words
            text = re.sub(r"\]\([^)]*\)", "]", page.read_text(encoding="utf-8")).replace('"""', "")  # links name rows
            found[str(page.relative_to(ROOT))] = ruled_out(f'"""{text}"""', glossary_of(ROOT))
    assert {page: words for page, words in found.items() if words} == {}


def test_a_ruled_out_word_would_be_noticed() -> None:
    assert ruled_out("# it enters by the door", glossary_of(ROOT)).keys() == {"door"}
    assert ruled_out("# row door.3.speed", glossary_of(ROOT)) == {}

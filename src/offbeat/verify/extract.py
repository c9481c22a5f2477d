r"""Find the final answer in a completion. The rules are the same for every kind of answer:

1. Only the text after the last `</think>` counts, and of that the last 8,000 characters.
2. Marked answers of the strongest kind present count: `<answer>…</answer>`, then `\boxed{…}`, then `#### …` to the end
   of the line, then "the answer is …" or "Answer: …" to the end of the sentence. Inside `<answer>` the other marks
   apply.
3. Without any mark, the last non-empty line is the answer.
4. Every answer marked in that way must be right. A completion that marks different answers has not answered.

Each pattern is linear in the 8,000 characters, so hostile text costs milliseconds.
"""

import re
from collections.abc import Callable
from typing import Final

TAIL: Final = 8_000
"""Characters at the end of a completion to search for a final answer."""

_TAGGED: Final = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)
_BRACES: Final = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{|\\.|[{}]", re.DOTALL)
# '#### 18' is an answer; '#### Step 2' and '#### 2. Add them' are headings.
_HASHES: Final = re.compile(r"(?<!#)####(?!#)[ \t]*(?!\d+[.)][ \t]+[A-Za-z])(?=[-+−–$€£¥₹\\(*.\d])(.*)")
_PROSE: Final = re.compile(
    r"\banswer\b(?: ?\([^()\n]{0,40}\))?(?: (?:to|of|for) [^.:=\n]{1,60}?)?"
    r"[\s*_]{0,4}(?:\bis\b|\bwould be\b|\bequals\b|=|:)[\s:*_]{0,8}(?=([^\n]{0,400}))",
    re.IGNORECASE,
)
_SENTENCE_END: Final = re.compile(r"[.!?](?=[\s*_]|$)")
_NEGATION: Final = re.compile(r"\b(?:not|never|neither|nor|cannot|none|unlike|except)\b|n['’]t\b", re.IGNORECASE)


def final_answers(text: str, counts: Callable[[str], bool] = bool) -> tuple[str, ...]:
    r"""Return the different final answers of a completion; all of them must be right.

    `counts` decides if the text after "the answer is" can be an answer: "the answer is clear" has none.

    >>> final_answers(r"First \boxed{9}, so \boxed{18}. The answer is 7.")
    ('9', '18')
    >>> final_answers("The answer is clear.\nIt is $18.", counts=lambda part: any(map(str.isdigit, part)))
    ('It is $18.',)
    """
    text = text[-TAIL:].rpartition("</think>")[2]
    tagged = _TAGGED.findall(text)
    found = (
        [answer for part in tagged for answer in _marked(part, counts) or [part]] if tagged else _marked(text, counts)
    )
    return tuple(dict.fromkeys(answer.strip() for answer in found or [last_line(text)]))


def last_line(text: str) -> str:
    """Return the last non-empty line without a leading bullet and a final exclamation mark.

    >>> last_line("so:\\n- it is 18!\\n")
    'it is 18'
    """
    line = re.sub(r"^[ \t]*(?:[-*•]|>)[ \t]+", "", text.strip().rpartition("\n")[2])
    return line.rstrip("!") if re.search(r"[A-Za-z]{2}", line) else line  # 3! alone is a factorial


def boxed(text: str) -> list[str]:
    r"""Return the content of each closed `\boxed{…}`, the innermost if they are nested, in one pass.

    >>> boxed(r"so \boxed{\frac{1}{2}}, not \boxed{2")
    ['\\frac{1}{2}']
    """
    opened: list[tuple[int, bool]] = []
    found: list[str] = []
    inner_until = -1
    for token in _BRACES.finditer(text):
        if token[0].endswith("{") and token[0] != r"\{":
            opened.append((token.end(), token[0] != "{"))
        elif token[0] == "}" and opened:
            start, box = opened.pop()
            if box and start > inner_until:
                found.append(text[start : token.start()])
                inner_until = token.start()
    return found


def denies(answer: str) -> bool:
    """Return True if an answer contains a negation.

    >>> denies("not 18"), denies("18 knots")
    (True, False)
    """
    return _NEGATION.search(answer) is not None


def _marked(text: str, counts: Callable[[str], bool]) -> list[str]:
    """Return the answers with the strongest kind of mark present."""
    return boxed(text) or _HASHES.findall(text) or [part for part in _prose(text) if counts(part)]


def _prose(text: str) -> list[str]:
    """Return the text after each "the answer is", to the end of the sentence."""
    return [_SENTENCE_END.split(words, maxsplit=1)[0].strip(" \t*_") for words in _PROSE.findall(text)]

"""Text that would act if anybody let it."""

from typing import Final

TEXTS: Final = (
    "<script>document.title='owned'</script>",
    "</pre></article></main><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)><a href="javascript:alert(1)">',
    "{{ 7 * 7 }}{% raw %}",
    "\x1b[2J\x1b]0;owned\x07\x9b31m",
    "abc\u202egnihtyna\u2066\u2069\u200f\u200b",
    "\x00\x08\x0d\u2028\u2029\ufeff\ud800",
    "A" * 1_000_000,
    "<style>*{display:none}</style><link rel=stylesheet href=http://evil.example/x.css>",
    "z" + "\u0301" * 500,
)
"""Scripts, markup, templates, terminal commands, direction marks, what cannot be encoded, one line of a megabyte."""


def encodable(text: str) -> str:
    """As a tokenizer's file can hold it.

    >>> encodable("a\\ud800")
    'a?'
    """
    return text.encode("utf-8", "replace").decode()

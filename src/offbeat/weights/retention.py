"""Which versions may go: a pure rule over version numbers.

A version needs its chain: the patches back to the nearest anchor, and that anchor. What nobody needs may go, the latest
first, so that whoever is killed in between leaves no version whose chain is broken.
"""

from collections.abc import Collection, Iterable, Mapping


def chain(version: int, bases: Mapping[int, int | None]) -> list[int]:
    """A version and what it rests on, given the base of every version that is not an anchor.

    >>> chain(12, {10: None, 11: 10, 12: 11})
    [12, 11, 10]
    """
    links = [version]
    while (base := bases.get(links[-1])) is not None:
        links.append(base)
    return links


def removable(bases: Mapping[int, int | None], keep: int, needed: Collection[int] = ()) -> list[int]:
    """Versions that neither the newest `keep` nor `needed` rest on, in the order to remove them.

    >>> removable({0: None, 1: 0, 2: None, 3: 2, 4: 3}, keep=2)
    [1, 0]
    >>> removable({0: None, 1: 0, 2: None, 3: 2, 4: 3}, keep=2, needed=[0])
    [1]
    """
    wanted: Iterable[int] = {*sorted(bases)[-max(keep, 1) :], *(set(needed) & bases.keys())}
    kept = {link for version in wanted for link in chain(version, bases)}
    return sorted(bases.keys() - kept, reverse=True)

"""How much of a batch replay can really draw, computed from the settings before a run. No torch."""


def possible_replays(
    steps: int, *, batch: int, wanted: int, uses: int, cooldown: int, age: int, every: int
) -> list[int]:
    """Return how many past groups each step of a run can draw at most.

    The groups of a step share a version. They may be drawn again after `cooldown` steps, until the version is `age`
    steps old or they were used `uses` times. What retires first is drawn first, which no other order can beat. A step
    that lacks past groups generates fresh ones instead. Measured drift may retire groups earlier.

    >>> possible_replays(5, batch=8, wanted=4, uses=4, cooldown=0, age=200, every=1)
    [0, 4, 4, 4, 4]
    >>> possible_replays(5, batch=8, wanted=4, uses=4, cooldown=5, age=3, every=4)   # retired before they may be drawn
    [0, 0, 0, 0, 0]
    """
    # Groups that are interchangeable, as [version, step of the last draw, uses left, number of groups].
    pool: list[list[int]] = []
    drawn = []
    for k in range(steps):
        version = k - k % every
        pool = [one for one in pool if one[2] > 0 and k - one[0] <= age]
        missing, used = wanted, []
        for one in sorted(pool):
            if one[1] < k - cooldown and missing:
                taken = min(missing, one[3])
                one[3] -= taken
                missing -= taken
                used.append([one[0], k, one[2] - 1, taken])
        drawn.append(wanted - missing)
        pool = [one for one in pool if one[3]] + used + [[version, k, uses - 1, batch - drawn[-1]]]
    return drawn

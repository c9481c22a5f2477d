"""What can go wrong with a weight log, each with its own type and a sentence that says what to do."""


class WeightLogError(Exception):
    """Something the weight log could not do, and what the person can do about it."""


class DamagedFile(WeightLogError):
    """A file is not what its publisher wrote. Nothing of it was used."""


class DamagedState(WeightLogError):
    """Tensors in memory are not the state that was published. They were dropped; the next fetch starts anew."""


class WrongBase(WeightLogError):
    """A patch was about to be applied to a state it was not made on."""


class VersionMissing(WeightLogError):
    """The log does not hold this version: it was retired, or never published."""


class VersionTaken(WeightLogError):
    """A version with this number, or a later one, is in the log already, with another state."""


class AnotherPublisher(WeightLogError):
    """Somebody else publishes to this log."""

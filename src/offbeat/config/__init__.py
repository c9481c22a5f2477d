"""The configuration of a run. No torch, so it is checked in milliseconds.

sections.py    the tables of the TOML file, with the meaning of every setting
objective.py   the table [objective]: a preset and changes to it
adapter.py     the table [adapter]
constants.py   the constants that only some presets have
config.py      the whole configuration, and what follows from it: lag, batches, the plan in words
replays.py     how much of a batch replay can really draw
conflicts.py   settings that conflict, each with changes that help
parsing.py     from plain data to a configuration, or to everything wrong with it
recorded.py    configurations that earlier versions recorded, in today's settings
toml_file.py   TOML files and `--set`, with the line number of every problem
knobs.py       every setting as text, for `offbeat explain` and `offbeat init`
"""

from offbeat.config.config import Config
from offbeat.config.parsing import Examined, examine, parse
from offbeat.config.toml_file import load
from offbeat.errors import ConfigError

__all__ = ["Config", "ConfigError", "Examined", "examine", "load", "parse"]

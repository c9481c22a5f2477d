"""The configuration of a run. No torch, so it is checked in milliseconds.

sections.py    the tables of the TOML file, with the meaning of every setting
parts.py       engines and sinks by name
objective.py   the table [objective]: a preset, its constants, and changes to it
axes.py        an objective as a table, and back
config.py      the whole configuration, and what follows from it: lag, batches, replays, the plan in words
conflicts.py   settings that conflict, each with changes that help
known.py       what is known about the lag of a run
parsing.py     TOML, `--set` and recorded configurations, with every problem and its line
knobs.py       every setting as text, and what other tools call it
"""

from offbeat.config.config import Config
from offbeat.config.parsing import Examined, examine, load, parse
from offbeat.errors import ConfigError

__all__ = ["Config", "ConfigError", "Examined", "examine", "load", "parse"]

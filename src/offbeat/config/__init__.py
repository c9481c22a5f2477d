"""The configuration of a run: its sections, the rules between them, and TOML files with line numbers. No torch."""

from offbeat.config.config import Config, Examined, examine, parse
from offbeat.config.toml_file import load
from offbeat.errors import ConfigError

__all__ = ["Config", "ConfigError", "Examined", "examine", "load", "parse"]

"""The command line: one thin file per command. `--help` imports nothing heavy."""

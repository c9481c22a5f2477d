"""`python -m offbeat`: the command line where `offbeat` is not on the search path, as in many notebooks."""

from offbeat.cli.main import main

if __name__ == "__main__":
    main()

"""Runs the command line as ``python -m rollout_tools.cli``."""

from rollout_tools.cli.main import main

if __name__ == "__main__":
    main()

"""Runs the command line as ``python -m rollout_worker.cli``."""

from rollout_worker.cli.main import main

if __name__ == "__main__":
    main()

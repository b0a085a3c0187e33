"""Runs the plugin as ``python -m rollout_api.kubectl_plugin``."""

from rollout_api.kubectl_plugin.cli import main

if __name__ == "__main__":
    main()

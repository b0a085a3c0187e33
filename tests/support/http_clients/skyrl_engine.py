"""SkyRL's arguments of vLLM, as its trainers compute them from settings.

Run ``python skyrl_engine.py SKYRL SETTING…``: SKYRL is a folder with the package ``skyrl``, and SETTING is one of those
of ``SkyRLTrainConfig``. It prints the method of vLLM's configuration and this project's settings in it, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import AsyncEngineArgs

from tests.support.http_clients.skyrl_modules import import_from_skyrl


def main(folder: Path, settings: list[str]) -> None:
    """Compute vLLM's configuration."""
    sys.path.insert(0, str(folder / "skyrl-gym"))  # SkyRL's configuration imports it
    config = import_from_skyrl(folder, "train.config").SkyRLTrainConfig.from_cli_overrides(settings)
    build = import_from_skyrl(folder, "backends.skyrl_train.inference_servers.utils").build_vllm_cli_args
    vllm_config = AsyncEngineArgs.from_cli_args(build(config)).create_engine_config()
    print(json.dumps([vllm_config.speculative_config.model, vllm_config.additional_config]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

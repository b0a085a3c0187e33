"""Lets TRL's AsyncGRPOTrainer, which asks for the name of its GPU, start without one.

With ``SEND_WEIGHTS_ON_CPU``, it also sends all weights, for which it would use NCCL.
"""

from __future__ import annotations

import os

import torch

torch.cuda.get_device_name = lambda device=None: "CPU"
if os.environ.get("SEND_WEIGHTS_ON_CPU"):
    from tests.support.vllm_sender_on_cpu import install

    install()

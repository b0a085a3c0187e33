"""Lets TRL's AsyncGRPOTrainer, which asks for the name of its GPU, start without one."""

from __future__ import annotations

import torch

torch.cuda.get_device_name = lambda device=None: "CPU"

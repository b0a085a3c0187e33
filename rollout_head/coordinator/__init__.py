"""The coordinator of a job: it admits requests, assigns rollouts to engines and reassigns those of lost engines."""

from rollout_head.coordinator.coordinator import Coordinator

__all__ = ["Coordinator"]

"""Figures of a training step: how its rollouts were drafted, how long its tail was, and what rewards they have."""

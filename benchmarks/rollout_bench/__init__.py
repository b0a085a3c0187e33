"""Compares ways to draft and to schedule rollouts on recorded rollouts, in a simulation of the engines.

- :mod:`workload`: the training steps that a recorded trace stands for.
- :mod:`accelerators`: how long a forward pass takes on a GPU.
- :mod:`engine`: one engine, step by step. It is given a drafter from :mod:`drafters`.
- :mod:`job`: a job of several training steps on several engines: order, drafts for coming prompts.
- :mod:`methods`: the ways to draft and to schedule that are compared, each with the values among which it is tuned.
"""

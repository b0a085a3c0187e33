"""``rollout doctor``: examines whether a machine, a Redis server, a manifest and a cluster are fit for rollout jobs.

Modules that end in ``_facts`` read facts. The others judge them, and are pure.
"""

"""A report about a job: a recording of what happened, its analysis, and a page with plots and the rollouts."""

"""Dataset sources: their problems, the trainer that samples them, and the report of the results."""

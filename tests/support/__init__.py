"""Real servers, reference implementations and harnesses that several tests share."""

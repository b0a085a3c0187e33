"""Drafting in vLLM engines that belong to somebody else: a trainer, or ``vllm serve``."""

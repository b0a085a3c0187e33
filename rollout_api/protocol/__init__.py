"""The protocol between trainers, the coordinator and engines: Redis keys, messages and their encoding."""

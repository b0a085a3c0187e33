"""The HTTP server of a job: the APIs of OpenAI and vLLM, on the protocol between trainers and jobs."""

"""A Triton backend named ``cpu`` that compiles nothing, so that vLLM can use Triton's interpreter without a GPU.

vLLM disables Triton on CPUs unless Triton has a backend of this name (``vllm/triton_utils/importing.py``, seen in
0.32). The interpreter (``TRITON_INTERPRET=1``) needs no backend. Triton finds this one by the entry point
``triton.backends``; it is never active, so that it has no effect on GPUs.
"""

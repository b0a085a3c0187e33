"""Worker extensions that let tests change a running engine."""

from __future__ import annotations

import itertools
import sys
from typing import Any

from rollout_worker.engine.worker_extension import DraftingExtension


class FaultyExtension(DraftingExtension):
    """The extension of an engine whose drafting can be made to fail."""

    def test_let_drafting_fail(self, times: int) -> None:
        """Let the next *times* drafts fail."""
        assert self._das_loop is not None
        self._let_fail(self._das_loop._batch, "step", times)

    def test_let_new_requests_fail(self, times: int) -> None:
        """Let the interface to vLLM fail when it passes on the next *times* requests."""
        self._let_fail(self._das_loop, "add", times)

    def test_switch_interval(self) -> float:
        """Return how long a thread of the process that runs the steps keeps the interpreter to itself, in seconds."""
        return sys.getswitchinterval()

    def _let_fail(self, owner: Any, name: str, times: int) -> None:
        remaining = [times]
        original = getattr(owner, name)

        def fail(*args: Any, **kwargs: Any) -> Any:
            if remaining[0]:
                remaining[0] -= 1
                raise RuntimeError("the index is damaged")
            return original(*args, **kwargs)

        setattr(owner, name, fail)


class UngovernedExtension(DraftingExtension):
    """The extension of a user's engine that drafts also where drafting does not pay."""

    def das_start_drafting(self, drafting: dict[str, Any]) -> bool:
        """Start to draft without the governor."""
        return super().das_start_drafting(drafting | {"governed": False})


class PlacesExtension(DraftingExtension):
    """The extension of an engine that counts drafts for requests whose tokens are at another place."""

    def test_check_places(self) -> None:
        """Check from now on that each request's place has its prompt."""
        loop = self._das_loop
        assert loop is not None
        add, draft, token_ids = loop.add, loop.draft, loop._arrays.token_ids
        prompts: dict[str, list[int]] = {}
        self._wrong_places = self._checked_places = 0

        def checked_add(request_id: str, settings: Any, prompt: Any, end_tokens: list[int]) -> None:
            prompts[request_id] = list(prompt)
            add(request_id, settings, prompt, end_tokens)

        def checked_draft(request_ids: list[str], num_tokens: Any, places: Any, *others: Any, **named: Any) -> None:
            for request_id, place in zip(request_ids, places.tolist(), strict=True):
                if loop.knows(request_id) and request_id in prompts:
                    prompt = prompts[request_id]
                    self._checked_places += 1
                    self._wrong_places += token_ids[place, : len(prompt)].tolist() != prompt
            draft(request_ids, num_tokens, places, *others, **named)

        vars(loop).update(add=checked_add, draft=checked_draft)

    def test_places(self) -> tuple[int, int]:
        """Return how many places were wrong, and how many were checked."""
        return self._wrong_places, self._checked_places


class RestingExtension(DraftingExtension):
    """The extension of an engine that decodes many steps for reference."""

    _num_rests = 0

    def test_rest_often(self) -> None:
        """Launch every third step without waiting for its drafts from now on."""
        if self._das_loop is None:
            return
        steps = itertools.count()

        def rest() -> bool:
            rests = next(steps) % 3 == 0
            self._num_rests += rests
            return rests

        vars(self._das_loop).update(rest=rest)

    def test_rests(self) -> int:
        """Return how many steps were launched so."""
        return self._num_rests


class ExactVerificationExtension(RestingExtension):
    """The extension of an engine in which V2 lays out batches as it does for CUDA graphs of uneven drafts."""

    def test_verify_exactly(self) -> None:
        """Let the runner use the manager that it would use with CUDA graphs, of which every eighth size has one."""
        from rollout_worker.engine.exact_verification import ExactVerification
        from rollout_worker.policy.step_cost import CudaGraphs

        runner, scheduling = self.model_runner, self._das_scheduling
        assert runner.adaptive_verification is None
        assert scheduling is not None
        verification = ExactVerification(
            runner.req_states, runner.input_buffers.query_start_loc, 1024, drafts=self._das_loop is not None
        )
        runner.adaptive_verification, scheduling._graphs = verification, CudaGraphs(range(8, 1025, 8))
        self._deferred_steps = self._filler_tokens = 0
        make_drafts = scheduling._make_drafts

        def count_step(step: Any, release: Any) -> None:
            make_drafts(step, release)
            self._deferred_steps += 1
            self._filler_tokens += runner.speculator.filler_tokens

        vars(scheduling).update(_make_drafts=count_step)

    def test_let_drafts_be_late(self) -> None:
        """Let the device go on without drafts in every second step that is launched before its drafts are made."""
        verification = self.model_runner.adaptive_verification
        finish = verification._finish
        steps = itertools.count()

        def finish_late(step: Any, staged: Any) -> None:
            if next(steps) % 2:
                step.make_drafts(step, lambda *_: False)
            else:
                finish(step, staged)

        vars(verification).update(_finish=finish_late)

    def test_deferred(self) -> tuple[int, int]:
        """Return how many steps were launched before their drafts were made, and how many places these left over."""
        return self._deferred_steps, self._filler_tokens


class UniformDraftsExtension(RestingExtension):
    """The extension of an engine whose drafts have one length in each step, as with CUDA graphs that require this.

    The longest drafts have no graph, as if it were larger than the largest size.
    """

    def test_verify_uniformly(self) -> None:
        """Verify the same number of draft tokens for all requests of a step from now on."""
        from rollout_worker.engine.vllm_plugin import uniform_lengths

        scheduling = self._das_scheduling
        assert scheduling is not None
        scheduling.uniform_lengths = uniform_lengths(self.vllm_config.num_speculative_tokens)[:-1]
        self._das_controller.uniform_lengths = scheduling.uniform_lengths
        self._steps: list[list[int]] = []
        execute = scheduling._execute_model

        def execute_model(scheduler_output: Any) -> Any:
            if scheduler_output.scheduled_spec_decode_tokens and not scheduler_output.scheduled_new_reqs:
                self._steps.append(list(scheduler_output.num_scheduled_tokens.values()))
            return execute(scheduler_output)

        scheduling._execute_model = execute_model

    def test_steps_with_drafts(self) -> list[list[int]]:
        """Return the number of tokens of each request in the steps with drafts and without new requests."""
        return self._steps


class WarmUpExtension(DraftingExtension):
    """Runs the steps with drafts that vLLM runs on GPUs, before drafting starts, to compile its kernels."""

    def das_start_drafting(self, drafting: dict[str, Any]) -> bool:
        from vllm.v1.worker.gpu.warmup import warmup_kernels

        warmup_kernels(self.model_runner, self.execute_model, self.sample_tokens)
        return super().das_start_drafting(drafting)


class CudaGraphExtension(DraftingExtension):
    """Lets a rank choose CUDA graphs as it does on GPUs, although there are none to replay on CPUs."""

    def test_choose_graphs(self, support: str, sizes: list[int], steps: list[list[int]]) -> list[tuple[str, int]]:
        """Return the kind of the graph and the padded number of tokens of each step, given those of its responses.

        Args:
            support: name of the ``AttentionCGSupport`` that the attention backend claims.
            sizes: sizes of the graphs in tokens.
            steps: the number of tokens of each response.
        """
        from vllm.config import set_current_vllm_config
        from vllm.config.compilation import CUDAGraphMode
        from vllm.platforms import current_platform
        from vllm.v1.attention.backend import AttentionCGSupport
        from vllm.v1.worker.gpu import model_runner
        from vllm.v1.worker.utils import get_uniform_decode_token_count

        runner = self.model_runner
        for group in (group for groups in runner.attn_groups for group in groups):
            type(group.get_metadata_builder(0))._cudagraph_support = AttentionCGSupport[support]
        compilation = runner.compilation_config
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, sizes[-1]
        model_runner.has_compiled_submodule = lambda _: True
        type(current_platform)._global_graph_pool = ()
        with set_current_vllm_config(self.vllm_config):
            runner.initialize_kv_cache(runner.kv_cache_config, is_profiling=True)
        runner.cudagraph_manager._graphs_captured = True
        chosen = []
        for step in steps:
            tokens, longest = sum(step), max(step)
            uniform = get_uniform_decode_token_count(len(step), tokens, longest, decode_graph_eligible=True)
            graph = runner.cudagraph_manager.dispatch(len(step), tokens, uniform, 0, max_query_len=longest)
            chosen.append((graph.cg_mode.name, graph.num_tokens))
        return chosen


class CopyingExtension:
    """A trainer's extension that copies weights into the parameters, past vLLM's loaders."""

    model_runner: Any
    update_weights_count = 0

    def update_weights_from_path(self, path: str) -> None:
        """Replace the weights; the name is that of prime-rl's method."""
        for parameter in self.model_runner.get_model().parameters():
            parameter.data.copy_(parameter.data)
        self.update_weights_count += 1

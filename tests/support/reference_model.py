"""A model so small that its exact output distribution can be computed, and that distribution."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from rollout_api.manifest.spec import Sampling

VOCABULARY = 24
"""Number of token ids, small enough that every one is sampled often. The last is the end of sequence."""
EOS = VOCABULARY - 1
MAX_POSITIONS = 512
"""Maximum sequence length of the model."""
_MIN_OCCURRENCES = 20
"""Contexts that were sampled less often are not tested."""
_MIN_EXPECTED_COUNT = 5
"""Minimum expected count of each cell of the χ² test; less probable tokens are pooled."""
_IMPOSSIBLE = 1e-9
"""Tokens with a lower probability must never be sampled."""

_Result = TypeVar("_Result")


_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 64,
    "bos_token_id": None,
}


def small_qwen3(**settings: Any) -> Any:
    """Return a Qwen3 model of two small layers with random weights in float32; *settings* of its configuration."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {**_SMALL, "intermediate_size": 128, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(**shape | settings)).float()


def small_qwen3_moe(**settings: Any) -> Any:
    """Return a Qwen3 mixture of experts: two small layers of eight experts. Each token uses two."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SMALL, **experts, num_key_value_heads=2, **settings)).float()


def make_model(
    directory: Path,
    *,
    seed: int = 3,
    tied: bool = False,
    create: Callable[..., Any] = small_qwen3,
    last_words: Sequence[str] = (),
) -> Path:
    """Create a random Qwen3 model whose next-token distributions are neither flat nor deterministic.

    Its tokenizer has one word for each token: ``w0``, ``w1`` and so on, with *last_words* before the end of sequence.
    *create* returns the model for further settings of its configuration.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*(f"w{token}" for token in range(EOS - len(last_words))), *last_words, "<eos>"]
    vocabulary = {word: token for token, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    torch.manual_seed(seed)
    model = create(
        vocab_size=VOCABULARY, max_position_embeddings=MAX_POSITIONS, tie_word_embeddings=tied, eos_token_id=EOS
    )
    with torch.no_grad():
        # With tied embeddings, a larger factor would make every token repeat itself.
        model.lm_head.weight *= 4.0 if tied else 12.0
    model.save_pretrained(directory)
    return directory


class ReferenceDistribution:
    """The exact next-token distributions of a model under any sampling settings, computed in float32."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model.eval()

    def logits(self, contexts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits after each token of contexts of equal length, shape (contexts, length, VOCABULARY)."""
        with torch.inference_mode():
            logits = self._model(torch.tensor(contexts)).logits.double()
        return logits.clone()

    def probabilities(
        self, prompt: Sequence[int], responses: Sequence[Sequence[int]], sampling: Sampling
    ) -> NDArray[np.float64]:
        """Return the distribution that vLLM documents, after each response so far, shape (responses, VOCABULARY)."""
        logits = self.logits([[*prompt, *response] for response in responses])[:, -1]
        for row, response in zip(logits, responses, strict=True):
            _apply_restrictions(row, prompt, response, sampling)
        return torch.softmax(_truncate(logits / sampling.temperature, sampling), dim=-1).numpy()

    def logprobs(self, prompt: Sequence[int], response: Sequence[int], sampling: Sampling) -> NDArray[np.float64]:
        """Return the log-probabilities of all tokens at each position of a response, shape (tokens, VOCABULARY)."""
        return _logprobs(self.logits([[*prompt, *response]])[0], prompt, response, sampling).numpy()

    def prompt_logprobs(self, prompt: Sequence[int]) -> NDArray[np.float64]:
        """Return the log-probabilities of all tokens at each position of a prompt but the first, without settings.

        Their shape is (tokens − 1, VOCABULARY).
        """
        return torch.log_softmax(self.logits([prompt])[0, :-1], dim=-1).numpy()

    def errors(
        self, prompt: Sequence[int], response: Sequence[int], logprobs: Sequence[float], sampling: Sampling
    ) -> NDArray[np.float64]:
        """Return the absolute errors of the log-probabilities of a response's tokens, shape (tokens,)."""
        return self._errors(self.logits([[*prompt, *response]])[0], prompt, response, logprobs, sampling)

    def max_error(
        self, prompt: Sequence[int], response: Sequence[int], logprobs: Sequence[float], sampling: Sampling
    ) -> float:
        """Return the largest error of the log-probabilities of a response's tokens."""
        return float(self.errors(prompt, response, logprobs, sampling).max())

    def errors_after_switch(
        self,
        previous: ReferenceDistribution,
        switch: int,
        prompt: Sequence[int],
        response: Sequence[int],
        logprobs: Sequence[float],
        sampling: Sampling,
    ) -> NDArray[np.float64]:
        """Return :meth:`errors` where the keys and values of tokens before *switch* come from the *previous* model.

        The token before *switch* was sampled by the previous model, but is read by this one.
        """
        from transformers import DynamicCache

        tokens, read = torch.tensor([[*prompt, *response]]), len(prompt) + switch - 1
        cache = DynamicCache()
        with torch.inference_mode():
            first = previous._model(tokens[:, :read], past_key_values=cache).logits
            then = self._model(tokens[:, read:], past_key_values=cache).logits
        return self._errors(torch.cat([first, then], dim=1).double()[0].clone(), prompt, response, logprobs, sampling)

    def _errors(
        self,
        logits: torch.Tensor,
        prompt: Sequence[int],
        response: Sequence[int],
        logprobs: Sequence[float],
        sampling: Sampling,
    ) -> NDArray[np.float64]:
        exact = _logprobs(logits, prompt, response, sampling)
        chosen = exact[range(len(response)), list(response)]
        return (chosen - torch.tensor(logprobs, dtype=torch.float64)).abs().numpy()


def _logprobs(logits: torch.Tensor, prompt: Sequence[int], response: Sequence[int], sampling: Sampling) -> torch.Tensor:
    """Return the log-probabilities at each position of a response, from the logits after each token."""
    logits = logits[len(prompt) - 1 : -1]
    for position, row in enumerate(logits):
        _apply_restrictions(row, prompt, response[:position], sampling)
    return torch.log_softmax(_truncate(logits / sampling.temperature, sampling), dim=-1)


def _apply_restrictions(row: torch.Tensor, prompt: Sequence[int], response: Sequence[int], sampling: Sampling) -> None:
    if sampling.structured_outputs:
        text = "".join(f"w{token}" for token in response)
        for token in range(VOCABULARY):
            if not is_permitted(sampling.structured_outputs["regex"], text, token):
                row[token] = -torch.inf
    if sampling.allowed_token_ids:
        barred = [token for token in range(VOCABULARY) if token not in sampling.allowed_token_ids]
        row[barred] = -torch.inf
    if len(response) < sampling.min_tokens:
        row[EOS] = -torch.inf
    for token, added in sampling.logit_bias.items():
        row[token] += added
    seen = sorted({*prompt, *response})
    row[seen] = torch.where(
        row[seen] > 0, row[seen] / sampling.repetition_penalty, row[seen] * sampling.repetition_penalty
    )
    for token, count in Counter(response).items():
        row[token] -= sampling.frequency_penalty * count + sampling.presence_penalty


def is_permitted(regex: Any, text: str, token: int) -> bool:
    """Return whether a token may follow a text that must match a regular expression.

    Four words ``w4`` must suffice to complete whatever can be completed.
    """
    if token == EOS:
        return re.fullmatch(regex, text) is not None
    return any(re.fullmatch(regex, f"{text}w{token}" + "w4" * words) for words in range(5))


def _truncate(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    if sampling.min_p:
        floor = logits.max(dim=-1, keepdim=True).values + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if sampling.top_k:
        floor = logits.topk(min(sampling.top_k, VOCABULARY), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if sampling.top_p < 1:
        ascending, order = logits.sort(dim=-1)
        outside = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        logits = logits.masked_fill(outside.scatter(1, order, outside), -torch.inf)
    return logits


def chi_square(
    reference: ReferenceDistribution,
    prompt: Sequence[int],
    responses: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    first: int = 1,
) -> tuple[float, int]:
    """Test whether tokens were sampled from the exact distribution, given the tokens before each.

    Args:
        reference: distribution of the model.
        prompt: prompt of all responses.
        responses: sampled responses.
        sampling: their sampling settings.
        first: first tested position of the responses. Position 0 follows the prompt and is never drafted.

    Returns:
        The p-value of the hypothesis that all tested tokens come from the distribution, and the number of tested
        tokens. The p-value is 0 if a token was sampled whose probability is 0.
    """
    following: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for response in responses:
        for position in range(first, len(response)):
            following[tuple(response[:position])][response[position]] += 1
    by_length: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for context, counts in following.items():
        if counts.total() >= _MIN_OCCURRENCES:
            by_length[len(context)].append(context)
    statistic, freedom, tested = 0.0, 0, 0
    for contexts in by_length.values():
        for context, p in zip(contexts, reference.probabilities(prompt, contexts, sampling), strict=True):
            counts = following[context]
            total = counts.total()
            tested += total
            observed = np.array([counts[token] for token in range(VOCABULARY)], dtype=float)
            if observed[p < _IMPOSSIBLE].any():
                return 0.0, tested
            cells, expected = _pool_rare_tokens(observed, p * total)
            statistic += float(((cells - expected) ** 2 / expected).sum())
            freedom += len(expected) - 1
    return chi_square_p_value(statistic, freedom), tested


def chi_square_p_value(statistic: float, freedom: int) -> float:
    """Return the probability that a χ² variable with so many degrees of freedom exceeds *statistic*."""
    halves = torch.tensor([freedom, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*halves))


def _pool_rare_tokens(
    observed: NDArray[np.float64], expected: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Combine tokens into cells, so that each cell has a sufficient expected count."""
    common = expected >= _MIN_EXPECTED_COUNT
    cells = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    if expected[-1] < _MIN_EXPECTED_COUNT and len(expected) > 1:
        rarest = int(expected[:-1].argmin())
        cells[rarest] += cells[-1]
        expected[rarest] += expected[-1]
        cells, expected = cells[:-1], expected[:-1]
    return cells, expected


class LoopThread:
    """An asyncio event loop in a thread, for engines that several tests share."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _Result], timeout: float = 300) -> _Result:
        """Run *work* in the loop and return its result.

        Raises:
            TimeoutError: after *timeout* seconds; the stacks of all tasks are printed before.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            if not future.done():
                for task in asyncio.all_tasks(self._loop):
                    task.print_stack()
            raise

    def stop(self) -> None:
        """Stop the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def make_adapter(directory: Path, model: Path, seed: int, *, rank: int = 5) -> Path:
    """Create a random adapter of all linear layers, in PEFT's format."""
    torch.manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if "proj" in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, weight.shape[1]) * 0.2
            tensors[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], rank) * 0.2
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    modules = sorted({name.split(".")[-3] for name in tensors})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def merged_distribution(model: Path, adapter: Path, directory: Path) -> ReferenceDistribution:
    """Return the distribution of a model into which an adapter was merged."""
    shutil.copytree(model, directory)
    weights, added = (load_file(path) for path in (model / "model.safetensors", adapter / "adapter_model.safetensors"))
    settings = json.loads((adapter / "adapter_config.json").read_text())
    for name in weights:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in added:
            product = added[f"{module}.lora_B.weight"] @ added[f"{module}.lora_A.weight"]
            weights[name] = weights[name] + settings["lora_alpha"] / settings["r"] * product
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return ReferenceDistribution(directory)

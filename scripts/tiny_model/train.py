"""Train the tiny policy from scratch on the CPU, and save checkpoints during training.

The model is a small Qwen3. It is trained on the solutions of a stream of problems without repetitions, beginning with
short ones. Hidden matrices are updated with Muon (Jordan et al. 2024; update scale as in Liu et al., arXiv 2502.16982),
embeddings and norms with AdamW. The learning rate warms up, stays constant, and decays at the end. The first checkpoint
is that of a beginner, for RL to improve; the others are close to each other, as successive policies of an RL run are.

Two Python threads compute one half of each step each. Within an operation, PyTorch uses a single thread, because its
OpenMP threads wait for each other in every operation, which makes a step many times slower beside busy processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from scripts.tiny_model.tasks import training_problems
from scripts.tiny_model.tokenizer import build_tokenizer

if TYPE_CHECKING:
    import torch

_IGNORED = -100  # the label that torch's cross entropy skips
_THREADS = 2
_LENGTH_STEP = 32  # batches are padded to multiples of it: bfloat16 kernels are slow on odd lengths


@dataclass(frozen=True)
class Recipe:
    """The parameters that determine the weights together with the seed; by default, those of the shipped policy.

    Attributes:
        vocabulary: maximum number of tokens; merging stops earlier if every word is a token.
        hidden_size, layers, intermediate_size, heads, kv_heads, head_dim: the Qwen3 shape.
        max_positions: maximum length of a sequence in tokens.
        query_gain: initial gain of the normed queries. Queries and keys have unit root mean square, so at gain 1
            and head dimension 64 no attention score exceeds 8, which hardly singles out one token of hundreds.
        batch_tokens: number of tokens in an optimizer step, including padding.
        steps: number of optimizer steps.
        curriculum_steps: number of steps with limited sequence length: 128 tokens in the first half, then growing to
            1,024. Copying from the prompt is learned from short problems, which require it most often.
        matrix_rate: peak learning rate of hidden matrices (Muon, scaled to AdamW's update size).
        embedding_rate: peak learning rate of embeddings and norms (AdamW).
        warmup_steps: number of steps during which both rates rise linearly.
        decay_steps: number of final steps during which both rates fall linearly to a twentieth.
        checkpoints: steps after which the policy is saved, ascending, the last one equal to ``steps``.
    """

    vocabulary: int = 512
    hidden_size: int = 128
    layers: int = 4
    intermediate_size: int = 384
    heads: int = 3
    kv_heads: int = 3
    head_dim: int = 64
    max_positions: int = 4096
    query_gain: float = 2.0
    batch_tokens: int = 6144
    steps: int = 1440
    curriculum_steps: int = 360
    matrix_rate: float = 6e-3
    embedding_rate: float = 3e-3
    warmup_steps: int = 20
    decay_steps: int = 960
    checkpoints: tuple[int, ...] = (270, 1080, 1200, 1320, 1440)

    def __post_init__(self) -> None:
        if not self.checkpoints or list(self.checkpoints) != sorted(set(self.checkpoints)):
            raise ValueError(f"checkpoints must be ascending steps, at least one; got {self.checkpoints}")
        if self.checkpoints[0] < 1 or self.checkpoints[-1] != self.steps:
            raise ValueError(f"checkpoints must lie in 1…steps and end with steps={self.steps}; got {self.checkpoints}")

    def rate_scale(self, step: int) -> float:
        """Return the fraction of the peak learning rate at a step, counted from 0."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        cool = min(1.0, (self.steps - step) / max(1, self.decay_steps))
        return warm * max(0.05, cool)

    def length_limit(self, step: int) -> float:
        """Return the maximum sequence length in tokens at a step; infinity after the curriculum."""
        if step >= self.curriculum_steps:
            return math.inf
        growth = max(0.0, 2 * step / self.curriculum_steps - 1)
        return 128 * 8**growth


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a training run.

    Attributes:
        step: number of completed optimizer steps.
        steps: total number of optimizer steps.
        loss: mean cross entropy per response token of the last batch, in nats.
        checkpoint: name of the checkpoint that was saved after this step, if any.
    """

    step: int
    steps: int
    loss: float
    checkpoint: str | None


@dataclass(frozen=True)
class Example:
    """A training sequence: token ids. The first ``prompt`` of them do not contribute to the loss."""

    ids: list[int]
    prompt: int


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint after a step."""
    return f"step-{step:04d}"


def train(
    directory: Path,
    *,
    seed: int,
    recipe: Recipe,
    progress: Callable[[TrainingProgress], None] | None = None,
) -> Path:
    """Train the policy and save its checkpoints.

    The result depends on seed, recipe, library versions and type of CPU, and on nothing else.

    Args:
        directory: an existing directory. Each checkpoint ``step-XXXX`` in it is a complete Hugging Face model directory
            (float32 safetensors, tokenizer with chat template, generation configuration).
        seed: seed of weights and data, 0 to 1023.
        recipe: parameters of the training.
        progress: called after every step.

    Returns:
        The directory of the last checkpoint.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer(
        (text for _, *texts in islice(training_problems(seed), 1500) for text in texts),
        vocabulary=recipe.vocabulary,
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        intermediate_size=recipe.intermediate_size,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_positions,
        # Untied: vLLM on the CPU keeps a packed copy of a tied output matrix that reloading does not renew.
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    generation = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), ThreadPoolExecutor(_THREADS) as pool:
            torch.manual_seed(seed)
            # On the CPU at these lengths plain matrix products are faster than torch's fused attention.
            model = Qwen3ForCausalLM._from_config(config, attn_implementation="eager")
            _initialize(model, recipe)
            optimizers = _optimizers(model, recipe)
            batches = _batches(_examples(seed, tokenizer), recipe, Random(seed))
            model.train()
            for step in range(recipe.steps):
                loss = _step(model, optimizers, next(batches), recipe.rate_scale(step), pool)
                saved = None
                if step + 1 in recipe.checkpoints:
                    saved = checkpoint_name(step + 1)
                    _save(directory / saved, model, generation, tokenizer)
                if progress is not None:
                    progress(TrainingProgress(step + 1, recipe.steps, loss, saved))
    finally:
        torch.set_num_threads(threads)
    return directory / checkpoint_name(recipe.steps)


def _save(checkpoint: Path, *parts: Any) -> None:
    """Save the parts of a checkpoint, without a progress bar and readable by all users (pods run as other users)."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        for part in parts:
            part.save_pretrained(checkpoint)
    finally:
        if shown:
            logging.enable_progress_bar()
    for file in checkpoint.iterdir():
        file.chmod(0o644)


def _fast_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 matrices in hardware; on others, float32 is faster."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _examples(seed: int, tokenizer: Any) -> Iterator[Example]:
    """Yield tokenized training problems endlessly."""
    problems = training_problems(seed)
    while True:
        chunk = list(islice(problems, 256))
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
            )
            for _, question, _ in chunk
        ]
        prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
        solution_ids = tokenizer([solution for _, _, solution in chunk], add_special_tokens=False)["input_ids"]
        for prompt, solution in zip(prompt_ids, solution_ids, strict=True):
            yield Example([*prompt, *solution, tokenizer.eos_token_id], len(prompt))


def _batches(examples: Iterator[Example], recipe: Recipe, rng: Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Group examples of similar length, so that little padding is needed, and shuffle the groups.

    Yields:
        Token ids and labels, int64, each of shape (rows, length), with rows · length ≤ ``batch_tokens`` unless a single
        example is longer.
    """
    import torch

    drawn = 0
    while True:
        limit = recipe.length_limit(drawn)
        short = (example for example in examples if len(example.ids) <= limit)
        window = sorted(islice(short, 256), key=lambda example: len(example.ids))
        groups: list[list[Example]] = [[]]
        for example in window:
            length = -(-len(example.ids) // _LENGTH_STEP) * _LENGTH_STEP
            if groups[-1] and length * (len(groups[-1]) + 1) > recipe.batch_tokens:
                groups.append([])
            groups[-1].append(example)
        rng.shuffle(groups)
        drawn += len(groups)
        for group in groups:
            longest = max(len(example.ids) for example in group)
            length = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
            ids = torch.zeros(len(group), length, dtype=torch.int64)
            labels = torch.full((len(group), length), _IGNORED, dtype=torch.int64)
            for row, example in enumerate(group):
                sequence = torch.tensor(example.ids)
                ids[row, : len(sequence)] = sequence
                labels[row, example.prompt : len(sequence)] = sequence[example.prompt :]
            yield ids, labels


def _initialize(model: Any, recipe: Recipe) -> None:
    """Start every layer as the identity, so that token identities reach all layers from the first step."""
    import torch

    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, recipe.query_gain)


def _optimizers(model: torch.nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Create Muon for the hidden matrices, one for the share of each thread, and AdamW for all other parameters."""
    import torch

    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and ".layers." in name else others).append(parameter)
    half = len(matrices) // _THREADS
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(share, lr=recipe.matrix_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw", ns_steps=4)
        for share in (matrices[:half], matrices[half:])
    ]
    optimizers.append(
        torch.optim.AdamW(others, lr=recipe.embedding_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def _step(
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batch: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    pool: Executor,
) -> float:
    """Run one optimizer step, and return the batch's loss in nats per response token."""
    import torch

    ids, labels = batch
    targets = int((labels[:, 1:] != _IGNORED).sum())
    parameters = list(model.parameters())

    def differentiate(ids: torch.Tensor, labels: torch.Tensor) -> tuple[float, tuple[torch.Tensor, ...]]:
        """Return the share of these rows in the batch's loss, and its gradients."""
        loss = _loss_sum(model, ids, labels) / targets
        return loss.item(), torch.autograd.grad(loss, parameters)

    def update(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * scale
        optimizer.step()

    shares = list(pool.map(differentiate, ids.chunk(_THREADS), labels.chunk(_THREADS)))
    loss = sum(share for share, _ in shares)
    if not math.isfinite(loss):
        raise FloatingPointError(f"training diverged: loss {loss}; lower matrix_rate and embedding_rate in the recipe")
    for parameter, first, *others in zip(parameters, *(gradients for _, gradients in shares), strict=True):
        parameter.grad = sum(others, start=first)
    list(pool.map(update, optimizers))
    return loss


def _loss_sum(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross entropies of the response tokens of some rows."""
    import torch

    # Padding is at the end of rows, after all tokens with a loss, so causal attention needs no mask.
    with torch.autocast("cpu", torch.bfloat16, enabled=_fast_bfloat16()):
        logits = model(input_ids=ids, use_cache=False).logits
    targets = labels[:, 1:].reshape(-1)
    kept = targets != _IGNORED
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1)[kept].float(), targets[kept], reduction="sum")
